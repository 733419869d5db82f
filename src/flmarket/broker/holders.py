"""Names of processes that hold a lease, and whether one that has not given it back may still be at work."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

__all__ = ["may_run", "new_holder"]

_LONGEST = 64


def new_holder() -> str:
    """A name for this process that no other has."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"[-_LONGEST:]


def may_run(holder: str) -> bool:
    """Whether the holder's process may still run; only known for processes of this machine."""
    host, _, rest = holder.partition(":")
    if host != socket.gethostname():
        return True
    try:
        pid = int(rest.partition(":")[0])
        os.kill(pid, 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return not _is_dead(pid)


def _is_dead(pid: int) -> bool:
    """Whether the process has ended and only its parent has not noticed; False where there is no /proc."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in ("Z", "X")
