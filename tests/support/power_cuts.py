"""Cut a market off where it stands: a function fails before or after it has done its work, in one thread only."""

import shutil
import threading
from contextlib import contextmanager


class PowerCut(BaseException):
    """Not an Exception: nothing in the service may handle it."""


def swap(monkeypatch, where, name, replacement):
    """Replace a function for this thread only: markets of other tests may be at work in threads of their own."""
    original, mine = getattr(where, name), threading.get_ident()

    def chosen(*args, **kwargs):
        return (replacement if threading.get_ident() == mine else original)(*args, **kwargs)

    monkeypatch.setattr(where, name, chosen)


def cut(monkeypatch, where, name, *, after, skip):
    """The power fails when this function is called (or has been called) for the time `skip` + 1."""
    original, calls = getattr(where, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        due = len(calls) == skip + 1
        if due and not after:
            raise PowerCut
        result = original(*args, **kwargs)
        if due:
            raise PowerCut
        return result

    swap(monkeypatch, where, name, failing)


class Snapshots:
    """What a process finds on the disk that starts after the power was cut: a copy of a folder for the beginning, and
    for the moment after each thing that was kept or sent. Before a step it is as it was after the one before."""

    def __init__(self, folder, into):
        self.folder, self.into, self.taken = folder, into, []
        self()

    def __call__(self):
        self.taken.append(self.into / f"{len(self.taken):03d}")
        gone = shutil.ignore_patterns("*-shm")  # shared memory, which a database makes anew
        shutil.copytree(self.folder, self.taken[-1], ignore=gone)

    def after_call(self, monkeypatch, where, name):
        """After every call of a function."""
        original = getattr(where, name)

        def watched(*args, **kwargs):
            result = original(*args, **kwargs)
            self()
            return result

        swap(monkeypatch, where, name, watched)

    def after_commit(self, monkeypatch, where, name):
        """After every transaction that this context manager commits at its end."""
        original = getattr(where, name)

        @contextmanager
        def watched(*args, **kwargs):
            with original(*args, **kwargs) as transaction:
                yield transaction
            self()

        swap(monkeypatch, where, name, watched)
