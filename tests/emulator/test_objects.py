"""Objects that ranks on emulated GPUs send each other."""

import pickle
from types import SimpleNamespace
from typing import Any

from planner.emulator.child import objects


class Group:
    """torch.distributed of one rank, whose transfers move nothing."""

    def __init__(self, rank: int, store: dict[str, bytes]) -> None:
        self.read: list[Any] = []
        self.c10d = SimpleNamespace(
            send_object_list=lambda objects, dst=None, group=None, group_dst=None: None,
            recv_object_list=self.receive,
            broadcast_object_list=self.broadcast,
            _rank_not_in_group=lambda group: False,
            _tensor_to_object=pickle.loads,
            _group_or_default_group=lambda group: group or "all",
            _get_process_group_name=str,
            _canonicalize_group_rank=lambda group, of_all, of_group: of_all if of_group is None else of_group,
            get_rank=lambda group: rank,
            _get_default_store=lambda: SimpleNamespace(set=store.__setitem__, get=store.__getitem__),
        )

    def receive(self, objects: list[Any], src: Any = None, group: Any = None, group_src: Any = None) -> int:
        objects[0] = self.c10d._tensor_to_object(b"")  # as no bytes came, torch's own would raise
        return int(src)

    def broadcast(self, objects: list[Any], src: Any, group: Any = None, group_src: Any = None) -> None:
        """Read objects as torch does on ranks that receive."""
        if self.c10d.get_rank(group) != src:
            objects[0] = self.c10d._tensor_to_object(b"")


def test_a_rank_reads_what_another_one_sent_in_order() -> None:
    store: dict[str, bytes] = {}
    first, second = Group(0, store).c10d, Group(1, store).c10d
    read = second._tensor_to_object
    send = objects._sending(first, first.send_object_list)
    receive = objects._receiving(second, second.recv_object_list)
    send(["a"], 1)
    send([{"b": 2}], group_dst=1)
    got: list[Any] = [None]
    assert receive(got, 0) == 0
    assert got == ["a"]
    receive(got, 0)
    assert got == [{"b": 2}]
    assert second._tensor_to_object is read


def test_all_ranks_read_what_one_broadcasts_in_order() -> None:
    """A trainer broadcasts the folder of its logs, of which the root alone knows."""
    store: dict[str, bytes] = {}
    first, second = Group(0, store).c10d, Group(1, store).c10d
    read = second._tensor_to_object
    send = objects._broadcasting(first, first.broadcast_object_list)
    receive = objects._broadcasting(second, second.broadcast_object_list)
    send(["logs"])
    send([None], 0)
    got: list[Any] = ["own"]
    receive(got)
    assert got == ["logs"]
    receive(got, 0)
    assert got == [None]
    assert second._tensor_to_object is read
