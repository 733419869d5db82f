"""What a market needs besides the ledger to go on after a crash: in memory, in files, or in a database (`broker`).

`RoundStore` is the face; `FileStore` keeps files in one folder, each written whole or not at all:

    terms.json           what holds for all rounds, in markets that settle something once
    checkpoint.npz       parameters before round `next`, and earlier models if they are averaged
    plan-000003.json     a round's bids cleared: awards and orders, written before any money moves
    exchange-000003.bin  a masked sum under way, as its last finished stage left it
    updates-000003.log   deliveries that were checked, appended and synchronised before they are counted
    record-000003.json   a round's record, written before the checkpoint that follows it

The log is read up to the first record that is not whole; the other files are there whole or not at all
(`flmarket.files`). Plan and deliveries of a round go once the checkpoint after it is written; a crash in between leaves
files that the next start ignores and removes.

What would break it: two servers on one folder. The lock file holds a system lock while a server runs.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flmarket.bids import FloatArray
from flmarket.errors import SettlementError
from flmarket.files import sync_folder, write_file
from flmarket.market.kind import RoundPlan, RoundRecord

if TYPE_CHECKING:
    from filelock import BaseFileLock

_HEADER = struct.Struct("<QQI")  # owner, bytes that follow, their checksum


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The model before round `next_round`, and the market's notes.

    `history` holds one model a row, none unless they are averaged. `owners` is what the owners' side needs to go on,
    where it is played in this process. `best` is the best model so far, where validation records tell.
    """

    next_round: int
    parameters: FloatArray
    history: Sequence[FloatArray]
    notes: dict[str, Any]
    owners: bytes = b""
    best: FloatArray | None = None


class RoundStore(Protocol):
    """One task's rounds. What a call has stored is there after any crash, unless `durable` is false."""

    durable: bool

    def lock(self) -> None:
        """Keep other drivers out until `unlock` or the end of the process."""

    def unlock(self) -> None:
        """Let others in."""

    def checkpoint(self) -> Checkpoint | None:
        """The last one, or None before the first."""

    def terms(self) -> dict[str, Any]:
        """What holds for all rounds; empty while that is not settled."""

    def plan(self, index: int) -> RoundPlan | None:
        """What was decided for a round, if it was."""

    def deliveries(self, index: int) -> dict[int, FloatArray]:
        """Checked deliveries of a round so far, by owner."""

    def record(self, index: int) -> RoundRecord | None:
        """A finished round's record."""

    def save_plan(self, plan: RoundPlan, terms: dict[str, Any]) -> None:
        """A round's plan and the terms that it follows from, before any money moves."""

    def save_deliveries(self, index: int, vectors: Mapping[int, FloatArray]) -> None:
        """From here on these deliveries count, whatever happens to this process."""

    def exchange(self, index: int) -> bytes:
        """A masked sum of the round under way, if there is one; empty otherwise."""

    def save_exchange(self, index: int, state: bytes) -> None:
        """How far a masked sum has come, in the place of what was saved before."""

    def save_round(self, record: RoundRecord, checkpoint: Checkpoint) -> None:
        """The round is over: its record, and the state after it. What led to them may go."""


class MemoryStore:
    """For simulations: nothing outlives the process."""

    durable = False

    def __init__(self) -> None:
        self._terms: dict[str, Any] = {}
        self._plan: RoundPlan | None = None
        self._updates: dict[int, FloatArray] = {}
        self._exchange: tuple[int, bytes] = (-1, b"")
        self._checkpoint: Checkpoint | None = None
        self._records: dict[int, RoundRecord] = {}

    def lock(self) -> None:
        """Nobody else has this object."""

    def unlock(self) -> None:
        """Nobody else has this object."""

    def checkpoint(self) -> Checkpoint | None:
        """See `RoundStore`."""
        return self._checkpoint

    def terms(self) -> dict[str, Any]:
        """See `RoundStore`."""
        return self._terms

    def plan(self, index: int) -> RoundPlan | None:
        """See `RoundStore`."""
        return self._plan if self._plan is not None and self._plan.index == index else None

    def deliveries(self, index: int) -> dict[int, FloatArray]:
        """See `RoundStore`."""
        return dict(self._updates)

    def record(self, index: int) -> RoundRecord | None:
        """See `RoundStore`."""
        return self._records.get(index)

    def save_plan(self, plan: RoundPlan, terms: dict[str, Any]) -> None:
        """See `RoundStore`."""
        self._plan, self._terms = plan, terms

    def save_deliveries(self, index: int, vectors: Mapping[int, FloatArray]) -> None:
        """See `RoundStore`."""
        self._updates.update(vectors)

    def exchange(self, index: int) -> bytes:
        """See `RoundStore`."""
        return self._exchange[1] if self._exchange[0] == index else b""

    def save_exchange(self, index: int, state: bytes) -> None:
        """See `RoundStore`."""
        self._exchange = index, state

    def save_round(self, record: RoundRecord, checkpoint: Checkpoint) -> None:
        """See `RoundStore`."""
        self._records[record.index], self._checkpoint = record, checkpoint
        self._plan, self._updates, self._exchange = None, {}, (-1, b"")


class FileStore:
    """The folder of one task's server.

    Not `synchronised`, it survives the end of the process at any moment, but not a power failure: for simulations.
    """

    durable = True

    def __init__(self, folder: Path, *, synchronised: bool = True) -> None:
        self.folder, self.synchronised = folder, synchronised
        folder.mkdir(parents=True, exist_ok=True)
        self._lock: BaseFileLock | None = None

    def lock(self) -> None:
        """Keep other servers out until `unlock` or the end of the process."""
        from filelock import FileLock, Timeout  # with the extras that keep files

        lock = FileLock(self.folder / "lock", timeout=0, thread_local=False)
        try:
            lock.acquire()
        except Timeout:
            raise SettlementError(f"another server is at work on {self.folder}") from None
        self._lock = lock

    def unlock(self) -> None:
        """Let others in."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def checkpoint(self) -> Checkpoint | None:
        """The last one, or None before the first."""
        path = self.folder / "checkpoint.npz"
        if not path.exists():
            return None
        with np.load(path, allow_pickle=False) as saved:
            notes, owners = json.loads(str(saved["notes"])), saved["owners"].tobytes() if "owners" in saved else b""
            best = saved.get("best")
            history, parameters = list(saved["history"]), saved["parameters"]
            return Checkpoint(int(saved["next_round"]), parameters, history, notes, owners, best)

    def save_round(self, record: RoundRecord, checkpoint: Checkpoint) -> None:
        """The record, then the checkpoint that follows it; then what led to them is cleared away."""
        self._write(f"record-{record.index:06d}.json", json.dumps(record.to_dict()).encode())
        buffer = io.BytesIO()
        np.savez(
            buffer,
            next_round=np.int64(checkpoint.next_round),
            parameters=checkpoint.parameters,
            history=np.array(checkpoint.history).reshape(-1, checkpoint.parameters.size),
            notes=np.array(json.dumps(checkpoint.notes)),
            owners=np.frombuffer(checkpoint.owners, dtype=np.uint8),
            allow_pickle=False,
            **({} if checkpoint.best is None else {"best": checkpoint.best}),
        )
        self._write("checkpoint.npz", buffer.getvalue())
        self.tidy(checkpoint.next_round)

    def tidy(self, next_round: int) -> None:
        """Remove plans and deliveries of rounds before the checkpoint, and unfinished files."""
        led = [path for name in ("plan-*", "exchange-*", "updates-*", "*.part") for path in self.folder.glob(name)]
        for path in led:
            if path.suffix == ".part" or int(path.stem.split("-")[1]) < next_round:
                path.unlink(missing_ok=True)

    def terms(self) -> dict[str, Any]:
        """What holds for all rounds; empty while that is not settled."""
        return self._read("terms.json") or {}

    def plan(self, index: int) -> RoundPlan | None:
        """What was decided for a round, if it was."""
        saved = self._read(f"plan-{index:06d}.json")
        return None if saved is None else RoundPlan.from_dict(saved)

    def save_plan(self, plan: RoundPlan, terms: dict[str, Any]) -> None:
        """The terms first: a plan follows from them."""
        if terms != self.terms():
            self._write("terms.json", json.dumps(terms).encode())
        self._write(f"plan-{plan.index:06d}.json", json.dumps(plan.to_dict()).encode())

    def record(self, index: int) -> RoundRecord | None:
        """A finished round's record."""
        saved = self._read(f"record-{index:06d}.json")
        return None if saved is None else RoundRecord.from_dict(saved)

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
            handle.flush()
            if self.synchronised:
                os.fsync(handle.fileno())
        if new and self.synchronised:
            sync_folder(self.folder)

    def exchange(self, index: int) -> bytes:
        """See `RoundStore`."""
        path = self.folder / f"exchange-{index:06d}.bin"
        return path.read_bytes() if path.exists() else b""

    def save_exchange(self, index: int, state: bytes) -> None:
        """See `RoundStore`."""
        self._write(f"exchange-{index:06d}.bin", state)

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        return json.loads(path.read_bytes()) if path.exists() else None

    def _write(self, name: str, content: bytes) -> None:
        write_file(self.folder / name, content, sync=self.synchronised)
