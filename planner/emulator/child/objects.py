"""Pass Python objects between ranks through the store of their process group.

The stand-in for NCCL moves no bytes between processes. But stages of a pipeline exchange the shapes of the
tensors that they will send as Python objects, and trainers exchange the folder of their logs.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

_ALL = -1  # in place of a rank


def attach(torch: Any) -> None:
    """Make the functions of torch.distributed that send and broadcast objects use the store.

    The original functions are still called, since they allocate tensors.
    """
    if not torch.distributed.is_available():
        return
    c10d = import_module("torch.distributed.distributed_c10d")
    replacements: dict[str, Callable[[Any, Callable[..., Any]], Callable[..., Any]]] = {
        "send_object_list": _sending,
        "recv_object_list": _receiving,
        "broadcast_object_list": _broadcasting,
    }
    for name, wrap in replacements.items():
        wrapped = wrap(c10d, getattr(c10d, name))
        for module in (c10d, torch.distributed):
            setattr(module, name, wrapped)


def _keys(c10d: Any) -> Callable[[Any, int, int], str]:
    """Return a function that makes the store's key for a group's next message to one rank, or to all."""
    counts: Counter[tuple[str, int, int]] = Counter()

    def key_of(group: Any, source: int, to: int) -> str:
        of = (c10d._get_process_group_name(group), source, to)
        counts[of] += 1
        return "/".join(map(str, ("planner/objects", *of, counts[of])))

    return key_of


def _sending(c10d: Any, plain: Callable[..., None]) -> Callable[..., None]:
    key_of = _keys(c10d)

    @wraps(plain)
    def send(
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        *args: Any,
        group_dst: int | None = None,
        **kwargs: Any,
    ) -> None:
        plain(object_list, dst, group, *args, group_dst=group_dst, **kwargs)
        group = c10d._group_or_default_group(group)
        to = c10d._canonicalize_group_rank(group, dst, group_dst)
        key = key_of(group, c10d.get_rank(group), to)
        c10d._get_default_store().set(key, pickle.dumps(object_list))

    return send


def _receiving(c10d: Any, plain: Callable[..., int]) -> Callable[..., int]:
    key_of = _keys(c10d)

    @wraps(plain)
    def receive(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        *args: Any,
        group_src: int | None = None,
        **kwargs: Any,
    ) -> int:
        group = c10d._group_or_default_group(group)
        source = c10d._canonicalize_group_rank(group, src, group_src)
        key = key_of(group, source, c10d.get_rank(group))
        objects = pickle.loads(c10d._get_default_store().get(key))  # noqa: S301  # as torch itself does
        with _no_bytes_come(c10d):
            rank = plain(object_list, src, group, *args, group_src=group_src, **kwargs)
        object_list[:] = objects
        return rank

    return receive


def _broadcasting(c10d: Any, plain: Callable[..., None]) -> Callable[..., None]:
    key_of = _keys(c10d)

    @wraps(plain)
    def broadcast(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        *args: Any,
        group_src: int | None = None,
        **kwargs: Any,
    ) -> None:
        group = c10d._group_or_default_group(group)
        source = 0 if src is None and group_src is None else src
        if c10d._rank_not_in_group(group):  # torch warns
            plain(object_list, source, group, *args, group_src=group_src, **kwargs)
            return
        root, store = c10d._canonicalize_group_rank(group, source, group_src), c10d._get_default_store()
        key, is_root = key_of(group, root, _ALL), c10d.get_rank(group) == root
        if is_root:
            store.set(key, pickle.dumps(object_list))
        with _no_bytes_come(c10d):
            plain(object_list, source, group, *args, group_src=group_src, **kwargs)
        if not is_root:
            object_list[:] = pickle.loads(store.get(key))  # noqa: S301  # as torch itself does

    return broadcast


@contextmanager
def _no_bytes_come(c10d: Any) -> Iterator[None]:
    """Let torch read no object from the tensors that a call receives."""
    read = c10d._tensor_to_object
    c10d._tensor_to_object = lambda *_: None
    try:
        yield
    finally:
        c10d._tensor_to_object = read
