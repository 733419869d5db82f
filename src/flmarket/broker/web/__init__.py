"""The HTTP service: the API (version 1) and the pages, both thin over `office`, and the door before them."""
