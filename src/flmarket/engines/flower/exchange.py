"""Asking many nodes at once and coming back on time, and knowing which node speaks for which owner.

Flower's own `send_and_receive` sleeps three seconds between looks over HTTP; `exchange` looks more often, and hands
every answer over as it comes, so that a delivery is safe before the slowest owner has answered. What has not come by
the deadline does not count: messages carry the deadline as their time to live, so Flower drops late answers too.

`Roster` maps nodes to owners. A node says whom it speaks for; the claim stands while that node is there. Two nodes that
claim one owner in the same roll-call both lose it. A broker who knows her owners passes `known` (node id → owner), and
other nodes are not heard. What would break it: SuperNodes without keys, where anybody can be a node; a deployment
registers keys (docs/flower.md).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from flwr.app import Message

if TYPE_CHECKING:
    from flwr.serverapp import Grid

_log = logging.getLogger(__name__)
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 0.5


def exchange(grid: Grid, messages: Iterable[Message], *, seconds: float) -> Iterator[list[Message]]:
    """Send, and hand over the answers that come within the time, as they come."""
    deadline = time.monotonic() + seconds
    waiting = {identifier for identifier in grid.push_messages(list(messages)) if identifier}
    wait = _FIRST_WAIT
    while waiting:
        came = []
        for answer in grid.pull_messages(waiting):
            if answer.metadata.reply_to_message_id in waiting:  # an answer counts once
                waiting.discard(answer.metadata.reply_to_message_id)
                came.append(answer)
        if came:
            yield came
            wait = _FIRST_WAIT
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            break
        time.sleep(min(wait, left))
        wait = min(1.5 * wait, _LONGEST_WAIT)


class Roster:
    """Which node speaks for which owner."""

    def __init__(self, known: Mapping[int, int] | None = None) -> None:
        self._known = None if known is None else dict(known)
        self._node_of: dict[int, int] = {}
        self._owner_of: dict[int, int] = {}

    def node(self, owner: int) -> int | None:
        """The owner's node, if she has one."""
        return self._node_of.get(owner)

    def owner(self, node: int) -> int | None:
        """Whom a node speaks for."""
        return self._owner_of.get(node)

    def roll_call(self, claims: Mapping[int, int], online: Iterable[int]) -> dict[int, int]:
        """Take claims (node → owner) and return those that stand."""
        there = set(online)
        self._node_of = {
            owner: node for owner, node in self._node_of.items() if node in there and claims.get(node, owner) == owner
        }
        wanted: dict[int, list[int]] = {}
        for node, owner in claims.items():
            if self._known is None or self._known.get(node) == owner:
                wanted.setdefault(owner, []).append(node)
        for owner, nodes in wanted.items():
            holder = self._node_of.get(owner)
            if holder is None and len(nodes) == 1:
                self._node_of[owner] = nodes[0]
            elif set(nodes) != {holder}:
                _log.warning("nodes %s all claim to be owner %s", nodes, owner)
        self._owner_of = {node: owner for owner, node in self._node_of.items()}
        return {node: owner for node, owner in claims.items() if self._node_of.get(owner) == node}
