"""Run DistributedDataParallel of user code on meta tensors.

The process group sends nothing. torch's own reducer makes the buckets, follows `static_graph` and
`find_unused_parameters`, and rebuilds the buckets for the second step; its C++ code runs on meta tensors
unchanged. There are two differences: ranks agree on shapes and on the order of gradients without
communication, and a reduction ends immediately. Since torch 2.8 NCCL's process group holds the tensors of a
collective until the next collective (pytorch/pytorch#148590).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel, distributed as data_parallel

from planner.capture.cuda.devices.placement import put_off_until_recorded
from planner.capture.cuda.names import Replacement
from planner.capture.distributed.point_to_point import in_both
from planner.capture.loop.ddp import INPUTS_HELD_SINCE
from planner.errors import UsageError
from planner.program import TorchVersion

_REFUSED = ("mixed_precision", "delay_all_reduce_named_params")


class Reduction:
    """The work object of an all-reduce that is already done."""

    def __init__(self, tensor: Tensor) -> None:
        """Store the tensor that was reduced in place."""
        self._tensor = tensor

    def wait(self, timeout: Any = None) -> bool:
        """Return True, since the reduction is done."""
        return True

    synchronize = is_completed = is_success = wait

    def get_future(self) -> Any:
        """Return a completed future that holds a list of the reduced tensor."""
        return _done([self._tensor])

    def result(self) -> list[Tensor]:
        """Return the reduced tensor in a list."""
        return [self._tensor]


class _Reducing:
    """An all-reduce that since torch 2.8 holds the tensor of the last asynchronous reduction."""

    def __init__(self, version: TorchVersion) -> None:
        self._plain = c10d.all_reduce
        self._holds_inputs = version >= INPUTS_HELD_SINCE
        self._held: Tensor | None = None

    def all_reduce(
        self, tensor: Tensor, op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Reduction | None:
        """All-reduce a tensor, and return a `Reduction` if the reduction is asynchronous, else None.

        If inputs are held, the tensor of an asynchronous reduction is held until the next one. Returns None
        too if the rank is not in the group.
        """
        if not async_op:
            self._plain(tensor, op, group)
            return None
        if self._plain(tensor, op, group, async_op=True) is None:  # the rank is not in the group
            return None
        if self._holds_inputs:
            self._held = tensor
        return Reduction(tensor)

    def reduce_bucket(self, group: Any, bucket: Any) -> Any:
        """Reduce a bucket of gradients, and return a completed future with the bucket's tensor.

        Serves as DDP's communication hook.
        """
        buffer = bucket.buffer()
        self.all_reduce(buffer, group=group, async_op=True)
        return _done(buffer)


def replacements(version: TorchVersion) -> Iterator[Replacement]:
    """Yield replacements with which DistributedDataParallel and all-reduce work on meta tensors.

    `version` is the version of torch on the GPU.
    """
    reducing, model = _Reducing(version), DistributedDataParallel
    yield from in_both("all_reduce", lambda _, *args, **kwargs: reducing.all_reduce(*args, **kwargs))
    yield data_parallel, "_verify_param_shape_across_processes", lambda *_, **__: True
    # It warns on standard error that meta tensors are not timed.
    yield torch._C._distributed_c10d.Logger, "set_runtime_stats_and_log", lambda logger: None
    yield model, "__init__", _on_meta(model.__init__)
    yield model, "_pre_forward", _with_hook(model._pre_forward, reducing)
    for name in ("register_comm_hook", "_register_builtin_comm_hook"):
        yield model, name, _refuse_hook


def _on_meta(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a version of DDP's constructor for the meta device, which runs once the set-up is recorded.

    It ignores `device_ids` and `output_device`, since the meta device has no index. It postpones `plain`
    until the set-up is recorded, so that the allocations of `plain` are recorded; until then the DDP object
    only holds the module. In a running loop `plain` runs at once. Raises UsageError for options that are not
    planned.
    """

    @functools.wraps(plain)
    def make(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **given: Any) -> None:
        refused = next((name for name in _REFUSED if given.get(name)), None)
        if refused:
            raise UsageError(
                f"DistributedDataParallel({refused}=...) is not planned; remove it, or planner run "
                "emulates such a script"
            )

        def construct() -> None:
            is_training, syncs = self.training, self.require_backward_grad_sync
            plain(self, module, **given)
            self.train(is_training)
            self.require_backward_grad_sync, self._planner_has_hook = syncs, False

        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = True
        self.process_group = given.get("process_group") or c10d._get_default_group()
        if not put_off_until_recorded(construct):
            construct()

    return make


def _with_hook(plain: Callable[..., Any], reducing: _Reducing) -> Callable[..., Any]:
    """Return a version of DDP's `_pre_forward` that first makes `reduce_bucket` the communication hook.

    The hook is registered once for each model.
    """

    @functools.wraps(plain)
    def before(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if not self._planner_has_hook:
            self._planner_has_hook = True
            register: Any = vars(distributed)["_register_comm_hook"]
            register(self.reducer, self.process_group, reducing.reduce_bucket)
        return plain(self, *inputs, **kwargs)

    return before


def _refuse_hook(*_: Any, **__: Any) -> None:
    raise UsageError(
        "DistributedDataParallel with a communication hook is not planned: how long its tensors live depends "
        "on NCCL's thread; remove it, or planner run emulates such a script"
    )


def _done(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future
