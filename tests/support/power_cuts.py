"""Cut a market off where it stands: a function fails before or after it has done its work, in one thread only."""

import threading


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
