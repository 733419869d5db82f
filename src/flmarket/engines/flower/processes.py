"""Processes and ports of a deployment on this machine.

A deployment marks its processes by a variable in their environment, which children inherit however they detach; so they
can be found and ended by id, and nobody else's are touched. Reads /proc: Linux only.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

__all__ = ["HOST", "MARK", "free_ports", "processes_marked", "send_signal", "signal_group"]

HOST = "127.0.0.1"
MARK = "FLMARKET_DEPLOYMENT"


def processes_marked(mark: str, command: str = "") -> list[int]:
    """Ids of living processes that carry a deployment's mark, those whose command line matches a pattern."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and wanted in (entry / "environ").read_bytes().split(b"\0"):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if re.search(command, line):
                    found.append(int(entry.name))
        except OSError:  # it ended meanwhile, or is somebody else's
            continue
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def send_signal(pid: int, number: int) -> None:
    """To one process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def signal_group(pid: int, number: int) -> None:
    """To a process and those of its group, if there are any."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
