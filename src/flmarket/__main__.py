"""`python -m flmarket` is the `flmarket` command."""

from flmarket.cli import main

main()
