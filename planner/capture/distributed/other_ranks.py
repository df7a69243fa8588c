"""Run other ranks of a job to get messages for the planned rank.

A message is metadata of a pipeline stage, or a list of Python objects.

Only one rank runs in a plan. If it receives a value that decides what it allocates, the rank that sends the
value is run first, until the value is sent.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from torch import distributed

from planner.capture.cuda.names import Replacement
from planner.capture.distributed.point_to_point import in_both
from planner.errors import PlannerError, UsageError

_Result = TypeVar("_Result")


class OtherRankError(PlannerError):
    """Base class of errors that stop a rank's run when it sends or receives a message."""


class MessageNeededError(OtherRankError):
    """Error of a rank that receives a message before the message is sent."""

    def __init__(self, message: Hashable, sender: int) -> None:
        """Create the error for a message and the rank that sends the message."""
        super().__init__(f"rank {sender} has not sent {message}")
        self.message, self.sender = message, sender


class _MessageSentError(OtherRankError):
    """Error that ends a rank's run after the wanted message is sent."""


class OtherRanks:
    """The messages that ranks of a job have sent, by name.

    The sender of a missing message is run to get the message.
    """

    def __init__(self) -> None:
        """Start without messages."""
        self._sent: dict[Hashable, Any] = {}
        self._wanted: Hashable = None

    def trace(self, rank: int, run: Callable[[int], _Result]) -> _Result:
        """Return `run(rank)`; while a message is missing, run its sender and try again."""
        while True:
            try:
                return run(rank)
            except MessageNeededError as needed:
                self._learn(needed, run)

    def _learn(self, needed: MessageNeededError, run: Callable[[int], Any], *waiting: Hashable) -> None:
        """Run the sender of a needed message until the message is sent.

        `waiting` are messages that depend on the needed message. Raises UsageError if ranks wait for each
        other, or if the sender does not send the message.
        """
        while needed.message not in self._sent:
            self._wanted = needed.message
            try:
                run(needed.sender)
            except _MessageSentError:
                return
            except MessageNeededError as further:
                if further.message in (needed.message, *waiting):
                    raise UsageError(f"rank {needed.sender} and others wait for each other") from None
                self._learn(further, run, needed.message, *waiting)
            else:
                raise UsageError(f"rank {needed.sender} does not send {needed.message}")
            finally:
                self._wanted = None

    def send(self, message: Hashable, content: Any) -> None:
        """Store a message's content for other ranks.

        Raises _MessageSentError if the run is only for this message.
        """
        self._sent[message] = content
        if message == self._wanted:
            raise _MessageSentError(f"{message} is sent")

    def receive(self, message: Hashable, sender: int) -> Any:
        """Return a message's content. Raises MessageNeededError if the sender has not sent the message."""
        if message not in self._sent:
            raise MessageNeededError(message, sender)
        return self._sent[message]

    def replacements(self) -> Iterator[Replacement]:
        """Yield replacements with which `broadcast_object_list` sends its list as a pickled message."""
        counts: Counter[Hashable] = Counter()

        def broadcast(
            plain: Callable[..., None], object_list: list[Any], src: int | None = None, group: Any = None,
            *_: Any, **options: Any,
        ) -> None:  # fmt: skip
            within = group or distributed.distributed_c10d._get_default_group()
            of_group = options.get("group_src")
            sender = src or 0 if of_group is None else distributed.get_global_rank(within, of_group)
            members = tuple(distributed.get_process_group_ranks(within))
            counts[members, sender] += 1
            to = ", ".join(map(str, members))
            message = f"object list {counts[members, sender]} from rank {sender} to ranks {to}"
            if distributed.get_rank() == sender:
                self.send(message, pickle.dumps(object_list))
            elif distributed.get_rank() in members:
                object_list[:] = pickle.loads(self.receive(message, sender))

        yield from in_both("broadcast_object_list", broadcast)
