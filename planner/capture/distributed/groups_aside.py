"""Hide the process's process groups during a plan.

A plan under torchrun can then make another group. No message is sent and no group is destroyed: torch's
tables of groups are emptied and refilled (torch/distributed/distributed_c10d.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d


@contextmanager
def groups_aside() -> Iterator[None]:
    """Hide existing process groups from torch inside the context. The groups are restored on exit."""
    if not distributed.is_initialized():
        yield
        return
    torchs: Any = distributed_c10d
    world = torchs._world
    tables = (
        *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag),
        *(world.tags_to_pg, world.pg_coalesce_state),
    )
    kept = [dict(table) for table in tables]
    names, default, count, comms = dict(world.pg_names), world.default_pg, world.group_count, [*world.comms]
    for name in names.values():
        torchs._unregister_process_group(name)
    _empty(tables, world)
    torchs._update_default_pg(None)
    world.group_count = 0
    try:
        yield
    finally:
        _empty(tables, world)
        for table, before in zip(tables, kept, strict=True):
            table.update(before)
        world.comms.extend(comms)
        for group, name in names.items():
            torchs._register_process_group(name, group)
        torchs._update_default_pg(default)
        world.group_count = count


def _empty(tables: tuple[Any, ...], world: Any) -> None:
    for table in tables:
        table.clear()
    world.comms.clear()
