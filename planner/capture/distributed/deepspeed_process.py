"""Make the process a rank of DeepSpeed on meta tensors.

The accelerator and the process group are replaced. DeepSpeed gets devices, streams and compiled operators
from its accelerator, so its engines run unchanged. Tensors that the engines make on the CPU are meta tensors
too, and take no memory of the GPU.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.capture.cuda.callers import package_of
from planner.capture.cuda.devices.host_tensors import Side
from planner.capture.cuda.devices.placement import Placement
from planner.capture.cuda.devices.queries import Handle, Stream
from planner.capture.cuda.streams import DEFAULT_STREAM
from planner.capture.cuda.threads import caller_frame
from planner.capture.distributed.process_group import process_group
from planner.capture.patching import always, patched
from planner.errors import UsageError
from planner.hardware import GPUS_OF_A_NODE

VERSION = "0.19"  # the only version whose engines are supported
_ENDLESS_BYTES = 2**50  # free memory reported, so that parameters are flattened on the GPU
_MAKING = ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like")
_WITH_STATE = ("comm.comm", "utils.groups", "runtime.zero.partition_parameters")
# Stand-ins for modules that compile code when each engine imports them.
_MUON = {
    "deepspeed.runtime.zero.muon.muon_optimizer": SimpleNamespace(MuonWithAuxAdam=type("Muon", (), {})),
    "deepspeed.runtime.zero.muon.original_muon": SimpleNamespace(muon_update=None),
}


@contextmanager
def deepspeed_process(ranks: int, placement: Placement) -> Iterator[None]:
    """Make the process rank 0 of `ranks` ranks of DeepSpeed inside the context.

    DeepSpeed must have been imported.
    """
    with ExitStack() as stack:
        stack.enter_context(process_group(ranks, placement.streams))
        of_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
        stack.enter_context(mock.patch.dict("os.environ", of_rank))
        stack.enter_context(mock.patch.dict(sys.modules, _MUON))
        holder = importlib.import_module("deepspeed.accelerator.real_accelerator")
        stack.enter_context(patched(holder, "ds_accelerator", make_accelerator(placement)))
        adam = importlib.import_module("deepspeed.ops.adam.fused_adam")
        stack.enter_context(patched(adam, "FusedAdamBuilder", _Operators))
        # ZeRO 3 replaces it for the rest of the process (zero/partition_parameters.py).
        stack.enter_context(patched(F, "linear", F.linear))
        for name in _WITH_STATE:
            stack.enter_context(_state_kept(importlib.import_module(f"deepspeed.{name}")))
        coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
        stack.enter_context(patched(coordinator, "assert_ints_same_as_other_ranks", _compare))
        for name in _MAKING:
            stack.enter_context(patched(torch, name, _making(getattr(torch, name), placement)))
        for name, read in _reads().items():
            stack.enter_context(patched(Tensor, name, read))
        yield


def import_deepspeed() -> None:
    """Import DeepSpeed, or raise UsageError if it does not import or has a version that is not supported.

    Must be called before functions of torch are replaced.
    """
    try:
        import deepspeed
    except ImportError as error:
        raise UsageError(
            f"--deepspeed: deepspeed does not import ({error}); DS_BUILD_OPS=0 pip install "
            f"'deepspeed=={VERSION}.*'"
        ) from error
    if not deepspeed.__version__.startswith(f"{VERSION}."):
        raise UsageError(
            f"--deepspeed: deepspeed {deepspeed.__version__} is installed, {VERSION} is planned; "
            f"pip install 'deepspeed=={VERSION}.*'"
        )
    importlib.import_module("deepspeed.compile.backend")  # each engine does; it imports torch's compiler


def _making(plain: Callable[..., Tensor], placement: Placement) -> Callable[..., Tensor]:
    """Return a version of `plain`, such as `torch.empty`, that makes DeepSpeed's CPU tensors on meta.

    The tensors count as memory of the host. The replacement affects calls from DeepSpeed's modules with the
    device `cpu` or `meta`.
    """

    @functools.wraps(plain)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is None or package_of(caller_frame()) != "deepspeed":
            return plain(*args, **kwargs)
        if torch.device(device).type not in ("cpu", "meta"):
            return plain(*args, **kwargs)
        is_pinned = kwargs.pop("pin_memory", False)
        with placement.host.moving_to(Side.HOST):
            made = plain(*args, **{**kwargs, "device": "meta"})
        return placement.host.pin(made) if is_pinned else made

    return make


def _reads() -> dict[str, Callable[[Tensor], Any]]:
    """Return replacements for `Tensor` methods that read a value, by name: DeepSpeed gets 0 or False.

    The values of meta tensors are unknown. Other callers and tensors get torch's answer. DeepSpeed reads the
    norms of gradients, and whether a gradient overflows.
    """

    def answering(plain: Callable[[Tensor], Any], answer: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def read(tensor: Tensor) -> Any:
            is_asked = tensor.is_meta and package_of(caller_frame()) == "deepspeed"
            return answer(tensor) if is_asked else plain(tensor)

        return read

    return {
        "item": answering(Tensor.item, lambda tensor: 0.0 if tensor.is_floating_point() else 0),
        "__bool__": answering(Tensor.__bool__, lambda _: False),
        "__float__": answering(Tensor.__float__, lambda _: 0.0),
    }


def _compare(ints: list[int]) -> None:
    """Allocate and free the tensors that DeepSpeed uses to compare integers among ranks.

    Source: zero/utils.py.
    """
    torch.empty((), dtype=torch.int64, device="meta")
    torch.empty(len(ints), dtype=torch.int64, device="meta")


@contextmanager
def _state_kept(module: ModuleType) -> Iterator[None]:
    """Restore a module's global variables when the context closes."""
    before = {
        name: copy(value) if isinstance(value, dict | list) else value for name, value in vars(module).items()
    }
    try:
        yield
    finally:
        vars(module).update(before)


class _Operators:
    """The stand-in for DeepSpeed's builder of compiled operators.

    The kernels of the operators work in place and allocate nothing.
    """

    def __init__(self, name: str = "") -> None:
        self.name = self.NAME = name

    def load(self, *_: Any, **__: Any) -> Any:
        """Return the operators that DeepSpeed's engines call on a GPU. Adam's kernels do nothing."""
        return SimpleNamespace(
            flatten=torch._utils._flatten_dense_tensors,
            unflatten=torch._utils._unflatten_dense_tensors,
            multi_tensor_adam=lambda *_, **__: None,
            multi_tensor_adam_capturable=lambda *_, **__: None,
        )


def make_accelerator(placement: Placement) -> Any:
    """Return a DeepSpeed accelerator that acts as CUDA on the planned GPU. It does not use CUDA."""
    base: Any = importlib.import_module("deepspeed.accelerator.cuda_accelerator").CUDA_Accelerator
    streams = placement.streams

    def build(self: Any) -> None:
        self._name, self._communication_backend_name, self._compile_backend = "cuda", "fake", "inductor"

    def operators(self: Any, name: str) -> _Operators | None:
        return None if name == "ShareMemCommBuilder" else _Operators(name)  # ShareMemCommBuilder is for CPUs

    answers: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_bf16_supported", "is_fp16_supported"), True),
        **dict.fromkeys(("is_triton_supported", "is_current_stream_capturing"), False),
        **dict.fromkeys(("total_memory", "available_memory"), _ENDLESS_BYTES),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached", "current_device"), 0),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), 0),
        **dict.fromkeys(("set_device", "synchronize", "range_push", "range_pop", "manual_seed"), None),
        **dict.fromkeys(("manual_seed_all", "reset_peak_memory_stats", "reset_max_memory_allocated"), None),
        "reset_max_memory_cached": None,
        "memory_stats": {},
        "device_count": GPUS_OF_A_NODE,
        "current_device_name": "cuda:0",
    }
    methods: dict[str, Any] = {
        "__init__": build,
        **{name: always(value) for name, value in answers.items()},
        "empty_cache": lambda self: placement.on_empty_cache(),
        "Stream": lambda self, *_, priority=0, **__: Stream(streams, streams.make(priority)),
        "stream": lambda self, stream: stream,
        "current_stream": lambda self, *_: Stream(streams, streams.current),
        "default_stream": lambda self, *_: Stream(streams, DEFAULT_STREAM),
        "Event": lambda self, *_, **__: Handle(),
        "create_op_builder": operators,
        "get_op_builder": lambda self, name: _Operators,
        "on_accelerator": lambda self, tensor: tensor.is_meta and tensor not in placement.host,
    }
    return type("PlannedAccelerator", (base,), methods)()
