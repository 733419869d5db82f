"""Files that are there whole or not at all: a reader never sees half a report."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from flmarket.errors import InvalidInput

__all__ = ["write_files"]


def write_files(out_dir: str | os.PathLike[str], files: Mapping[str, str | bytes]) -> Path:
    """Write named files into a directory, made if needed; all are on disk before the first takes its name."""
    directory = Path(out_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InvalidInput("out_dir", str(directory), "a directory, or a path where one can be made") from None
    waiting: dict[Path, Path] = {}
    try:
        for name, content in files.items():
            temporary = directory / f".{name}.{secrets.token_hex(6)}.tmp"
            waiting[temporary] = directory / name
            # "x": never follow or overwrite what someone else put there
            with open(temporary, "xb") as handle:
                handle.write(content.encode() if isinstance(content, str) else content)
        for temporary, final in waiting.items():
            os.replace(temporary, final)
    finally:
        for temporary in waiting:
            temporary.unlink(missing_ok=True)
    return directory
