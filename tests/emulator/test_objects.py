"""Objects that ranks on emulated GPUs exchange."""

import pickle
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from planner.emulator.child import objects


class Store:
    """Messages by key; a message can be read once it is there."""

    def __init__(self) -> None:
        self._queues: dict[str, Queue[bytes]] = {}

    def set(self, key: str, message: bytes) -> None:
        self._queues.setdefault(key, Queue()).put(message)

    def get(self, key: str) -> bytes:
        queue = self._queues.setdefault(key, Queue())
        message = queue.get(timeout=60)
        queue.put(message)  # others read it too
        return message


class Rank:
    """The functions of torch.distributed in the process of one rank, whose transfers move nothing.

    As torch does, they read the objects that they return from the bytes that came, which are none.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        c10d = SimpleNamespace(
            send_object_list=self.send_object_list,
            recv_object_list=self.recv_object_list,
            broadcast_object_list=self.broadcast_object_list,
            all_gather_object=self.all_gather_object,
            gather_object=self.gather_object,
            scatter_object_list=self.scatter_object_list,
            _tensor_to_object=pickle.loads,
            _rank_not_in_group=lambda group: False,
            _group_or_default_group=lambda group: group or "all",
            _get_process_group_name=str,
            _canonicalize_group_rank=lambda group, of_all, of_group: of_all if of_group is None else of_group,
            get_rank=lambda group: rank,
            get_world_size=lambda group: size,
            _get_default_store=lambda: store,
        )
        self.rank, self.c10d, self._counts = rank, c10d, Counter[str]()

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a function as it is after `attach`."""
        plain: Callable[..., Any] = getattr(self.c10d, name)
        return objects.exchanging(self.c10d, plain, objects.EXCHANGES[name], self._counts)(*args, **kwargs)

    def send_object_list(
        self, object_list: Any, dst: Any = None, group: Any = None, group_dst: Any = None
    ) -> None:
        """Send nothing."""

    def recv_object_list(
        self, object_list: Any, src: Any = None, group: Any = None, group_src: Any = None
    ) -> Any:
        object_list[0] = self.c10d._tensor_to_object(b"")
        return src

    def broadcast_object_list(
        self, object_list: Any, src: Any = None, group: Any = None, group_src: Any = None
    ) -> None:
        if self.rank != (src or 0):
            object_list[0] = self.c10d._tensor_to_object(b"")

    def all_gather_object(self, object_list: Any, obj: Any, group: Any = None) -> None:
        object_list[0] = self.c10d._tensor_to_object(b"")

    def gather_object(
        self,
        obj: Any,
        object_gather_list: Any = None,
        dst: Any = None,
        group: Any = None,
        group_dst: Any = None,
    ) -> None:
        if object_gather_list is not None:
            object_gather_list[0] = self.c10d._tensor_to_object(b"")

    def scatter_object_list(
        self,
        scatter_object_output_list: Any,
        scatter_object_input_list: Any = None,
        src: Any = None,
        group: Any = None,
        group_src: Any = None,
    ) -> None:
        scatter_object_output_list[0] = self.c10d._tensor_to_object(b"")


@pytest.fixture
def ranks() -> list[Rank]:
    store = Store()
    return [Rank(rank, 2, store) for rank in range(2)]


def together(ranks: list[Rank], job: Callable[[Rank], Any]) -> list[Any]:
    """Return what the job gives on each rank, as all run at a time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(job, ranks))


def test_a_rank_reads_what_another_one_sent_in_order(ranks: list[Rank]) -> None:
    first, second = ranks
    first.call("send_object_list", ["a"], 1)
    first.call("send_object_list", [{"b": 2}], group_dst=1)
    got: list[Any] = [None]
    assert second.call("recv_object_list", got, 0) == 0
    assert got == ["a"]
    second.call("recv_object_list", got, 0)
    assert got == [{"b": 2}]
    assert second.c10d._tensor_to_object is pickle.loads


def test_all_ranks_read_what_one_broadcasts_in_order(ranks: list[Rank]) -> None:
    """A trainer broadcasts the folder of its logs, of which the root alone knows."""
    first, second = ranks
    first.call("broadcast_object_list", ["logs"])
    first.call("broadcast_object_list", [None], 0)
    got: list[Any] = ["own"]
    second.call("broadcast_object_list", got)
    assert got == ["logs"]
    second.call("broadcast_object_list", got, 0)
    assert got == [None]


def test_every_rank_gathers_the_objects_of_all(ranks: list[Rank]) -> None:
    """Metrics of an evaluation are gathered so, twice in a row."""

    def job(rank: Rank) -> list[list[Any]]:
        gathered: list[list[Any]] = [[None, None], [None, None]]
        for number, objects_of_all in enumerate(gathered):
            rank.call("all_gather_object", objects_of_all, {"rank": rank.rank, "number": number})
        return gathered

    expected = [[{"rank": rank, "number": number} for rank in range(2)] for number in range(2)]
    assert together(ranks, job) == [expected, expected]


def test_one_rank_gathers_and_scatters(ranks: list[Rank]) -> None:
    """torch.distributed.checkpoint gathers the plan of each rank, and gives each its part of one plan."""

    def job(rank: Rank) -> list[Any]:
        gathered = [None, None] if rank.rank == 1 else None
        rank.call("gather_object", f"plan {rank.rank}", gathered, group_dst=1)
        part: list[Any] = [None]
        rank.call("scatter_object_list", part, gathered and [f"{plan}, whole" for plan in gathered], src=1)
        return part

    assert together(ranks, job) == [["plan 0, whole"], ["plan 1, whole"]]
