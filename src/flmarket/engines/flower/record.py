"""An owner's record on disk, opened once per process: her privacy account and her journal.

Opening and closing a database costs several synchronisations of the disk, more than a whole release; where one process
serves many messages (Flower's simulation), the files stay open. The latest `OPEN` records do. A file that was moved or
replaced is opened again. The cap of the owner's configuration must be the one in the file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from flmarket.engines.flower.journal import OwnerJournal
from flmarket.errors import InvalidInput
from flmarket.ledger import DurableAccount
from flmarket.privacy import Cap

__all__ = ["OwnerRecord", "close_records", "open_record"]

OPEN = 64
_lock = threading.Lock()
_open: OrderedDict[Path, OwnerRecord] = OrderedDict()


@dataclass(frozen=True)
class OwnerRecord:
    """Both files, and which ones they are."""

    account: DurableAccount
    journal: OwnerJournal
    files: tuple[int, int]

    def close(self) -> None:
        """Close both."""
        self.account.close()
        self.journal.close()


def open_record(path: Path, cap: Cap) -> OwnerRecord:
    """The record at `path`.account.sqlite and `path`.journal.sqlite, started with this cap if there is none."""
    with _lock:
        record = _open.pop(path, None)
        if record is not None and record.files != _files(path):
            record.close()
            record = None
        if record is None:
            journal = OwnerJournal(_journal(path))  # makes the folder
            record = OwnerRecord(DurableAccount.open(_account(path), cap), journal, _files(path))
        _open[path] = record
        while len(_open) > OPEN:
            _open.popitem(last=False)[1].close()
    if record.account.cap != cap:
        raise InvalidInput("cap", cap, f"the account's own cap {record.account.cap}")
    return record


def close_records() -> None:
    """Close all files, as the end of the process does."""
    with _lock:
        while _open:
            _open.popitem()[1].close()


def _account(path: Path) -> Path:
    return path.with_suffix(".account.sqlite")


def _journal(path: Path) -> Path:
    return path.with_suffix(".journal.sqlite")


def _files(path: Path) -> tuple[int, int]:
    """Which files these are now; −1 for one that is not there."""
    return tuple(p.stat().st_ino if p.exists() else -1 for p in (_account(path), _journal(path)))  # type: ignore[return-value]
