"""What a server needs besides the ledger to go on after a crash: files in one folder, each written whole or not at all.

    terms.json           what holds for all rounds, in markets that settle something once
    checkpoint.npz       parameters before round `next`, and earlier models if they are averaged
    plan-000003.json     a round's bids cleared: awards and orders, written before any money moves
    updates-000003.log   deliveries that were checked, appended and synchronised before they are counted
    record-000003.json   a round's record, written before the checkpoint that follows it

The log is read up to the first record that is not whole; the other files are written beside their place, synchronised
and renamed. Plan and deliveries of a round go once the checkpoint
after it is written; a crash in between leaves files that the next start ignores and removes.

What would break it: two servers on one folder. The lock file holds a system lock while a server runs.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from flmarket.errors import SettlementError

__all__ = ["Checkpoint", "RoundStore"]

FloatArray = NDArray[np.float64]

_HEADER = struct.Struct("<QQI")  # owner, bytes that follow, their checksum


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The model before round `next_round`, and the market's notes.

    `history` holds one model a row, none unless they are averaged.
    """

    next_round: int
    parameters: FloatArray
    history: FloatArray
    notes: dict[str, Any]


class RoundStore:
    """The folder of one task's server.

    Not `synchronised`, it survives the end of the process at any moment, but not a power failure: for simulations.
    """

    def __init__(self, folder: Path, *, synchronised: bool = True) -> None:
        self.folder, self.synchronised = folder, synchronised
        folder.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] | None = None

    def lock(self) -> None:
        """Keep other servers out until `unlock` or the end of the process."""
        handle = (self.folder / "lock").open("w", encoding="ascii")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            raise SettlementError(f"another server is at work on {self.folder}") from None
        self._lock = handle

    def unlock(self) -> None:
        """Let others in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def checkpoint(self) -> Checkpoint | None:
        """The last one, or None before the first."""
        path = self.folder / "checkpoint.npz"
        if not path.exists():
            return None
        with np.load(path, allow_pickle=False) as saved:
            notes = json.loads(str(saved["notes"]))
            return Checkpoint(int(saved["next_round"]), saved["parameters"], saved["history"], notes)

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint, then clear away what led to it."""
        buffer = io.BytesIO()
        np.savez(
            buffer,
            next_round=np.int64(checkpoint.next_round),
            parameters=checkpoint.parameters,
            history=checkpoint.history,
            notes=np.array(json.dumps(checkpoint.notes)),
        )
        self._write("checkpoint.npz", buffer.getvalue())
        self.tidy(checkpoint.next_round)

    def tidy(self, next_round: int) -> None:
        """Remove plans and deliveries of rounds before the checkpoint, and unfinished files."""
        for path in [*self.folder.glob("plan-*"), *self.folder.glob("updates-*"), *self.folder.glob("*.part")]:
            if path.suffix == ".part" or int(path.stem.split("-")[1]) < next_round:
                path.unlink(missing_ok=True)

    def terms(self) -> dict[str, Any] | None:
        """What holds for all rounds, if that is settled."""
        return self._read("terms.json")

    def save_terms(self, terms: dict[str, Any]) -> None:
        """Before the first plan that follows from them."""
        self._write("terms.json", json.dumps(terms).encode())

    def plan(self, index: int) -> dict[str, Any] | None:
        """What was decided for a round, if it was."""
        return self._read(f"plan-{index:06d}.json")

    def save_plan(self, index: int, plan: dict[str, Any]) -> None:
        """Before any money moves."""
        self._write(f"plan-{index:06d}.json", json.dumps(plan).encode())

    def record(self, index: int) -> dict[str, Any] | None:
        """A finished round's record."""
        return self._read(f"record-{index:06d}.json")

    def save_record(self, index: int, record: dict[str, Any]) -> None:
        """Before the checkpoint that follows it."""
        self._write(f"record-{index:06d}.json", json.dumps(record).encode(), sync_folder=False)

    def deliveries(self, index: int) -> dict[int, FloatArray]:
        """Checked deliveries of a round so far, by owner; a last one that was cut off does not count."""
        path = self.folder / f"updates-{index:06d}.log"
        found, content, at = {}, path.read_bytes() if path.exists() else b"", 0
        while at + _HEADER.size <= len(content):
            owner, length, checksum = _HEADER.unpack_from(content, at)
            body = content[at + _HEADER.size : at + _HEADER.size + length]
            if len(body) < length or zlib.crc32(body) != checksum:
                break
            found[owner] = np.frombuffer(body, dtype=np.float64)
            at += _HEADER.size + length
        if at < len(content):  # so that what is appended next can be read
            os.truncate(path, at)
        return found

    def save_deliveries(self, index: int, vectors: Mapping[int, FloatArray]) -> None:
        """From here on these deliveries count, whatever happens to this process."""
        path = self.folder / f"updates-{index:06d}.log"
        bodies = {owner: np.ascontiguousarray(vector).tobytes() for owner, vector in vectors.items()}
        new = not path.exists()
        with path.open("ab") as handle:
            for owner, body in bodies.items():
                handle.write(_HEADER.pack(owner, len(body), zlib.crc32(body)) + body)
            self._sync(handle)
        if new:
            self._sync_folder()

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return json.loads(path.read_bytes()) if path.exists() else None

    def _write(self, name: str, content: bytes, *, sync_folder: bool = True) -> None:
        part = self.folder / f"{name}.part"
        with part.open("wb") as handle:
            handle.write(content)
            self._sync(handle)
        part.replace(self.folder / name)
        if sync_folder:
            self._sync_folder()

    def _sync(self, handle: IO[bytes]) -> None:
        handle.flush()
        if self.synchronised:
            os.fsync(handle.fileno())

    def _sync_folder(self) -> None:
        if not self.synchronised:
            return
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
