"""Make the process one rank of a process group that sends nothing, as a script under torchrun needs it.

The script sets up its own process group. The script's `init_process_group` and `destroy_process_group` have
no effect, since the group is already open. Meshes on `cuda` become meshes on the meta device, and the
environment is as in a process that torchrun started.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, distributed

from planner.capture.cuda.callers import package_of
from planner.capture.cuda.checkpoints import sharded
from planner.capture.cuda.devices.placement import Placement
from planner.capture.cuda.names import Names, Replacement
from planner.capture.cuda.threads import caller_frame
from planner.capture.distributed import data_parallel, list_collectives, pipeline, point_to_point
from planner.capture.distributed.other_ranks import OtherRanks
from planner.capture.distributed.process_group import process_group
from planner.capture.techniques import fsdp
from planner.capture.techniques.technique import Technique
from planner.errors import UsageError
from planner.hardware import GPUS_OF_A_NODE
from planner.jobs import Job
from planner.program import TorchVersion, torch_version_of

_OR_RUN = "or planner run emulates such a script"
_FSDP1 = "FullyShardedDataParallel (FSDP1) is not planned; use fully_shard"
_OFFLOAD = (
    "fully_shard with CPUOffloadPolicy in a file is not planned; remove the policy, give --fsdp N "
    "--fsdp-arg offload=true for a model that the planner shards"
)


@contextmanager
def _as_launched(ranks: int, rank: int, other_ranks: OtherRanks, version: TorchVersion) -> Iterator[None]:
    """Set torchrun's environment variables for a rank and replace torch's functions inside the context.

    `version` is the version of torch on the GPU. The context must be opened inside `process_group`.
    """
    node = min(ranks, GPUS_OF_A_NODE)
    environment = {
        "WORLD_SIZE": ranks,
        "RANK": rank,
        "LOCAL_WORLD_SIZE": node,
        "LOCAL_RANK": rank % node,
        "GROUP_RANK": rank // node,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 29500,
    }
    with ExitStack() as stack:
        texts = {name: str(value) for name, value in environment.items()}
        stack.enter_context(mock.patch.dict("os.environ", texts))
        names = Names(
            (
                *_replacements(),
                *point_to_point.replacements(),
                *list_collectives.replacements(),
                *sharded.replacements(),
                *data_parallel.replacements(version),
                *pipeline.replacements(other_ranks),
                *other_ranks.replacements(),
            )
        )
        names.replace()
        stack.callback(names.restore)
        yield


def _replacements() -> Iterator[Replacement]:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    def mesh_of_all(mesh_dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
        ranks = distributed.get_world_size()
        return init_device_mesh("cuda", (ranks,), mesh_dim_names=mesh_dim_names)

    for name in ("init_process_group", "destroy_process_group"):
        yield distributed, name, _without_effect(getattr(distributed, name))
    yield distributed, "new_group", _of_any_backend(distributed.new_group)
    yield Tensor, "data_ptr", _address(Tensor.data_ptr)
    yield FullyShardedDataParallel, "__init__", _refusing(_FSDP1)
    yield FSDPParam, "__init__", _on_gpu(FSDPParam.__init__)
    yield _fully_shard, "_init_default_mesh", mesh_of_all
    yield DeviceMesh, "__init__", _on_meta(DeviceMesh.__init__)


def _address(plain: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
    """Return a wrapper of `Tensor.data_ptr` that gives accelerate a distinct address for each meta storage.

    Other callers get torch's answer. accelerate identifies an optimizer's parameters by address while it
    shards them (accelerate/accelerator.py).
    """

    @functools.wraps(plain)
    def data_ptr(tensor: Tensor) -> int:
        if not tensor.is_meta or package_of(caller_frame()) != "accelerate":
            return plain(tensor)
        return int(tensor.untyped_storage()._cdata)

    return data_ptr


def _without_effect(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def do_nothing(*_: Any, **__: Any) -> None:
        return None

    return do_nothing


def _refusing(what: str) -> Callable[..., None]:
    """Return a constructor that raises UsageError, for a class that is not planned."""

    def refuse(_: Any, *__: Any, **___: Any) -> None:
        raise UsageError(f"{what}, {_OR_RUN}")

    return refuse


def _on_gpu(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a wrapper of `FSDPParam.__init__` that raises UsageError for a CPUOffloadPolicy."""

    @functools.wraps(plain)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        given = (*args, *kwargs.values())
        if any(type(value).__name__ == "CPUOffloadPolicy" for value in given):
            raise UsageError(f"{_OFFLOAD}, {_OR_RUN}")
        plain(self, *args, **kwargs)

    return make


def _of_any_backend(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `new_group` that ignores the arguments `backend` and `device_id`.

    The new group has the backend of the open process group.
    """
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return plain(**{name: value for name, value in given.items() if name not in ("backend", "device_id")})

    return make


def _on_meta(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a wrapper of `DeviceMesh.__init__` that puts meshes of GPUs on the meta device."""

    @functools.wraps(plain)
    def make(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain(self, "meta" if device_type == "cuda" else device_type, *args, **kwargs)

    return make


def _is_used(job: Job) -> bool:
    return bool(job.sharding.world_size and not job.sharding.deepspeed)


@contextmanager
def _open_process(job: Job, placement: Placement, other_ranks: OtherRanks) -> Iterator[None]:
    ranks, rank = job.sharding.world_size, job.sharding.rank
    replacements = fsdp.replacements(lambda tensor: placement.on_resize(tensor))
    with (
        process_group(ranks, placement.streams, rank, replacements),
        _as_launched(ranks, rank, other_ranks, torch_version_of(job.environment.torch)),
    ):
        yield


LAUNCHED_RANK = Technique(_is_used, open_process=_open_process)
