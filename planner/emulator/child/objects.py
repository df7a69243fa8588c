"""Pass Python objects between ranks through the store of their process group.

The stand-in for NCCL moves no bytes between processes. But stages of a pipeline exchange the shapes of the
tensors that they will send as Python objects, trainers exchange the folder of their logs, and
torch.distributed.checkpoint gathers the plans of all ranks and scatters the parts of one plan.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any

_ALL = -1  # the receiver of a message to all ranks


def attach(torch: Any) -> None:
    """Patch torch.distributed so that ranks exchange Python objects through the group's store.

    The original functions are still called, since they allocate tensors.
    """
    if not torch.distributed.is_available():
        return
    c10d = import_module("torch.distributed.distributed_c10d")
    counts: Counter[str] = Counter()
    for name, exchange in EXCHANGES.items():
        wrapped = exchanging(c10d, getattr(c10d, name), exchange, counts)
        for module in (c10d, torch.distributed):
            setattr(module, name, wrapped)


def exchanging(
    c10d: Any, plain: Callable[..., Any], exchange: Callable[[_Call], None], counts: Counter[str]
) -> Callable[..., Any]:
    """Wrap a function of torch.distributed to also exchange its objects through the store.

    `counts` has the number of messages of this process by their kind, ranks and direction.
    """
    parameters = signature(plain)

    @wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        group = c10d._group_or_default_group(given.get("group"))
        with _no_bytes_come(c10d):
            result = plain(*args, **kwargs)
        if not c10d._rank_not_in_group(group):
            exchange(_Call(c10d, group, given, counts))
        return result

    return function


class _Call:
    """One rank's call of a function that exchanges objects within a process group.

    Messages of a kind between two ranks are received in the order in which they are sent.
    """

    def __init__(self, c10d: Any, group: Any, given: Mapping[str, Any], counts: Counter[str]) -> None:
        self._c10d, self._group, self._counts, self.given = c10d, group, counts, given
        self.own = int(c10d.get_rank(group))

    def rank(self, name: str) -> int:
        """Return the rank in the group that the call's argument `name`, "src" or "dst", stands for.

        The rank is the argument `group_<name>`, or the group rank of the global rank in the argument `name`.
        The global rank is 0 if neither is given.
        """
        of_all, of_group = self.given.get(name), self.given.get(f"group_{name}")
        of_all = 0 if of_all is None and of_group is None else of_all
        return int(self._c10d._canonicalize_group_rank(self._group, of_all, of_group))

    def ranks(self) -> range:
        """Return the ranks of the group."""
        return range(self._c10d.get_world_size(self._group))

    def send(self, kind: str, source: int, to: int, message: Any) -> None:
        """Send a message of a kind from one rank of the group to another.

        With `_ALL`, the message goes to all ranks.
        """
        key = self._key("sent", kind, source, to)
        self._c10d._get_default_store().set(key, pickle.dumps(message))

    def receive(self, kind: str, source: int, to: int) -> Any:
        """Wait for the next message of a kind between two ranks, and return it."""
        key = self._key("received", kind, source, to)
        return pickle.loads(self._c10d._get_default_store().get(key))  # noqa: S301  # as torch itself does

    def _key(self, direction: str, kind: str, source: int, to: int) -> str:
        key = f"planner/objects/{kind}/{self._c10d._get_process_group_name(self._group)}/{source}/{to}"
        self._counts[direction + key] += 1
        return f"{key}/{self._counts[direction + key]}"


def _send(call: _Call) -> None:
    call.send("list", call.own, call.rank("dst"), call.given["object_list"])


def _receive(call: _Call) -> None:
    call.given["object_list"][:] = call.receive("list", call.rank("src"), call.own)


def _broadcast(call: _Call) -> None:
    objects, root = call.given["object_list"], call.rank("src")
    if call.own == root:
        call.send("broadcast", root, _ALL, objects)
    else:
        objects[:] = call.receive("broadcast", root, _ALL)


def _gather_everywhere(call: _Call) -> None:
    call.send("all_gather", call.own, _ALL, call.given["obj"])
    for rank in call.ranks():
        call.given["object_list"][rank] = call.receive("all_gather", rank, _ALL)


def _gather(call: _Call) -> None:
    root = call.rank("dst")
    call.send("gather", call.own, root, call.given["obj"])
    if call.own == root:
        for rank in call.ranks():
            call.given["object_gather_list"][rank] = call.receive("gather", rank, root)


def _scatter(call: _Call) -> None:
    root = call.rank("src")
    if call.own == root:
        for rank in call.ranks():
            call.send("scatter", root, rank, call.given["scatter_object_input_list"][rank])
    call.given["scatter_object_output_list"][0] = call.receive("scatter", root, call.own)


EXCHANGES: dict[str, Callable[[_Call], None]] = {
    "send_object_list": _send,
    "recv_object_list": _receive,
    "broadcast_object_list": _broadcast,
    "all_gather_object": _gather_everywhere,
    "gather_object": _gather,
    "scatter_object_list": _scatter,
}


@contextmanager
def _no_bytes_come(c10d: Any) -> Iterator[None]:
    """Make torch read None instead of objects from received tensors inside the context."""
    read = c10d._tensor_to_object
    c10d._tensor_to_object = lambda *_: None
    try:
        yield
    finally:
        c10d._tensor_to_object = read
