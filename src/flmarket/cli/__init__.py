"""The `flmarket` command. Errors are one line on standard error, and each kind has its exit code."""

import sys

from flmarket.errors import FlmarketError

__all__ = ["main"]

INTERRUPTED = 130


def main() -> None:
    """Run the command and exit with its code (listed in docs/how-to.md)."""
    try:
        from flmarket.cli.app import app
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is not installed; the command comes with: pip install 'flmarket[app]'")
    try:
        app()
    except FlmarketError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
