"""A grid without a network: the same apps, called one node after the other in this process.

For trying things out without Ray, and for tests that need faults at exact moments. Messages and answers are the same
as elsewhere; an exception in an app becomes an error reply, as in Flower. What it does not show is concurrency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

_FIRST_NODE = 1_000


class InProcessGrid(Grid):
    """`nodes` many copies of one app, each with her own `partition-id`, as in Flower's simulation."""

    def __init__(
        self, app: ClientApp, nodes: int, node_config: Callable[[int], Mapping[str, str | int]] | None = None
    ) -> None:
        self.app = app
        self.contexts = {
            _FIRST_NODE + i: Context(
                run_id=1,
                node_id=_FIRST_NODE + i,
                node_config={"partition-id": i, "num-partitions": nodes, **(node_config(i) if node_config else {})},
                state=RecordDict(),
                run_config={},
            )
            for i in range(nodes)
        }
        self._answers: dict[str, Message] = {}
        # Flower's `Message` asks the process who it is; its simulation sets the same three.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID

    def set_run(self, run: Run) -> None:
        """There is only one run."""

    @property
    def run(self) -> Run:
        """The one run."""
        return Run.create_empty(1)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As `Message(...)`."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes are there."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver, and keep the answers until they are pulled."""
        identifiers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = identifier = str(uuid4())
            identifiers.append(identifier)
            for answer in self.answer(message):
                self._answers[identifier] = answer
        return identifiers

    def answer(self, message: Message) -> list[Message]:
        """What comes back; tests override this to lose, delay or change messages."""
        context = self.contexts[message.metadata.dst_node_id]
        try:
            return [self.app(message, context)]
        except Exception as error:
            return [Message(Error(code=0, reason=type(error).__name__), reply_to=message)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answers that are there."""
        return [self._answers.pop(identifier) for identifier in list(message_ids) if identifier in self._answers]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Both at once; nothing is late in one process."""
        return list(self.pull_messages(self.push_messages(list(messages))))
