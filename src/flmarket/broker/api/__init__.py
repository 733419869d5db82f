"""The HTTP API, version 1: thin functions over `services`."""
