"""Speed and scale, each figure against a named peer measured in the same run: `make bench`."""
