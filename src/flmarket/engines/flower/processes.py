"""Processes and ports of a deployment on this machine.

A deployment marks its processes by a variable in their environment, which children inherit however they detach; so they
can be found and ended by id, and nobody else's are touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket

import psutil

HOST = "127.0.0.1"
MARK = "FLMARKET_DEPLOYMENT"


def processes_marked(mark: str, command: str = "") -> list[int]:
    """Ids of living processes that carry a deployment's mark, those whose command line matches a pattern."""
    return [
        process.pid
        for process in psutil.process_iter(["status", "environ", "cmdline"])  # None where it is somebody else's
        if process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        and (process.info["environ"] or {}).get(MARK) == mark
        and re.search(command, " ".join(process.info["cmdline"] or ()))
    ]


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
