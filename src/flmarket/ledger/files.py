"""Files that only their owner may read: books and accounts say who sold what to whom.

Breaks on file systems without permissions, and against the machine's administrator.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

__all__ = ["keep_private"]


def keep_private(path: str | Path) -> None:
    """Make this SQLite file with mode 0600 if there is none, whatever the umask; take others' rights from an old one.

    SQLite gives the files beside it (write-ahead log, its index, journal) the mode of the file itself; those that a
    crash left behind are tightened too. What cannot be made or belongs to somebody else is left to SQLite to refuse.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(os.stat(f"{path}{suffix}").st_mode)
            if mode & 0o077:
                os.chmod(f"{path}{suffix}", mode & 0o700)
