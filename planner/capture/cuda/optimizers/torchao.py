"""Run the steps of torchao's optimizers with the allocations that they make on CUDA.

torchao compiles the step of each parameter separately (torchao/optim/adam.py). For state in 8 or 4 bits
inductor generates several kernels with buffers between them, for any other state one kernel without buffers.
Sizes and order follow the code that inductor of torch 2.13 generates; for large parameters it fuses more.
`CPUOffloadOptimizer` keeps large parameters, with their gradients and state, on the host
(torchao/optim/cpu_offload.py).
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from planner.capture.cuda.devices.moves import pinned_like
from planner.capture.cuda.optimizers.outside_memory import OutsideMemory
from planner.capture.patching import all_patched, patched
from planner.capture.wrapped import parts
from planner.errors import UsageError

_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_QUANTIZED = ("OptimState8bit", "OptimState4bit", "OptimStateFp8")
_FIRST_WITH_FP8 = (
    8,
    9,
)  # on older GPUs, Triton has no type for the state, whose conversions run operator by operator


def watch(outside: OutsideMemory, stack: ExitStack, capability: tuple[int, int]) -> None:
    """Replace torchao's compiled steps and methods of `CPUOffloadOptimizer` until the stack closes.

    The steps allocate as on a GPU of this compute capability; memory of the host is counted in `outside`.
    """
    adam: Any = sys.modules["torchao.optim.adam"]
    stack.enter_context(patched(adam, "single_param_adam", partial(_compiled_step, outside, capability)))
    stack.enter_context(patched(adam, "torch", _TorchWithoutCompiler()))
    offload: Any = sys.modules["torchao.optim.cpu_offload"].CPUOffloadOptimizer
    for name, replacement in _offloading(outside).items():
        stack.enter_context(patched(offload, name, replacement))


class _TorchWithoutCompiler:
    """A stand-in for the module torch whose `compile` returns functions unchanged.

    The functions that torchao would compile are replaced by others that need no compilation.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def compile(function: Any, **_: Any) -> Any:
        return function


def _compiled_step(
    outside: OutsideMemory, capability: tuple[int, int], p: Tensor, grad: Tensor, step: Tensor, *rest: Any
) -> None:
    """Allocate and free the buffers of one parameter's compiled step.

    Raises UsageError for amsgrad with quantized state, and for FP8 state on a GPU that is too old for it.
    """
    states = [state for state in rest[:3] if isinstance(state, Tensor)]
    rounds_randomly = rest[-1]
    kind = type(states[0]).__name__
    if kind in _QUANTIZED and len(states) > 2:
        raise UsageError(f"--optimizer: torchao's {kind} has no maximum, so that amsgrad fails; remove it")
    if kind == "OptimStateFp8" and capability < _FIRST_WITH_FP8:
        raise UsageError(
            "--optimizer: torchao's FP8 state is planned from compute capability 8.9 on; take its 8-bit state"
        )
    outside.compiles = True
    seed = torch.empty(1, dtype=torch.int64, device=p.device) if rounds_randomly else None
    if kind == "OptimStateFp8":
        scales = [torch.empty_like(state.scale) for state in states]  # type: ignore[attr-defined]
        values = [torch.empty_like(state.codes) for state in states]  # type: ignore[attr-defined]
        del seed
        _free_in_order([one for pair in zip(values, scales, strict=True) for one in pair], values, scales)
    elif kind == "OptimState8bit":
        scales = [torch.empty_like(state.scale) for state in states]  # type: ignore[attr-defined]
        values = [torch.empty(p.numel(), device=p.device) for _ in states]
        del seed
        _free_in_order(scales)
        _free_in_order(values)
    elif kind == "OptimState4bit":
        scales = [torch.empty_like(state.scale) for state in states]  # type: ignore[attr-defined]
        values = [torch.empty(p.numel(), device=p.device) for _ in states]
        codes = [torch.empty(p.numel(), dtype=torch.int64, device=p.device) for _ in states]
        del seed
        _free_in_order(
            [one for three in zip(values, codes, scales, strict=True) for one in three], values, codes, scales
        )


def _free_in_order(tensors: list[Tensor], *held: list[Tensor]) -> None:
    for other in held:
        other.clear()
    while tensors:
        del tensors[0]


@contextmanager
def offload_constructed(code: str) -> Iterator[None]:
    """Replace methods of torchao's `CPUOffloadOptimizer` inside the context if the source `code` names it.

    Does nothing if the code does not name the class, or torchao is not installed.
    """
    if "CPUOffloadOptimizer" not in code or find_spec("torchao") is None:
        yield
        return
    offload: Any = import_module("torchao.optim.cpu_offload").CPUOffloadOptimizer
    with ExitStack() as stack:
        for name, replacement in _offloading(OutsideMemory()).items():
            stack.enter_context(patched(offload, name, replacement))
        yield


def _offloading(outside: OutsideMemory) -> dict[str, Any]:
    """Return replacements for methods of `CPUOffloadOptimizer`, by name; they count host state in `outside`.

    The replacements optimize small parameters on the GPU, and pin host copies of the other parameters.
    """

    def init(
        self: Any,
        params: Any,
        optimizer_class: Any = torch.optim.AdamW,
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        **kwargs: Any,
    ) -> None:
        if optimizer_class is torch.optim.AdamW:
            kwargs.setdefault("fused", True)
        groups = list(params)
        groups = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
        self.offloaded, self.uncounted, self.pinned, self.d_param_groups = [], [], [], []
        for group in groups:
            options = {key: value for key, value in group.items() if key != "params"}
            trained = [one for one in group["params"] if one.requires_grad]
            small = [one for one in trained if one.numel() < minimal_size]
            for parameter in (one for one in trained if one.numel() >= minimal_size):
                self.offloaded.append(parameter)
                self.uncounted.append((parameter, optimizer_class, {**kwargs, **options}))
                self.pinned += [pinned_like(parameter), pinned_like(parameter)]  # itself and its gradient
                if offload_gradients:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)
            if small:
                self.d_param_groups.append({"params": small, **options})
        self.d_opt = optimizer_class(self.d_param_groups, **kwargs) if self.d_param_groups else None
        self.state = {} if self.d_opt is None else self.d_opt.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self: Any, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        while self.uncounted:
            outside.host_state_bytes += _state_bytes(*self.uncounted.pop())
        if self.d_opt is not None:
            self.d_opt.step()
        return loss

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        for parameter in self.offloaded:
            parameter.grad = None
        if self.d_opt is not None:
            self.d_opt.zero_grad(set_to_none=set_to_none)

    def param_groups(self: Any) -> list[dict[str, Any]]:
        return [*self.d_param_groups, *({"params": [one]} for one in self.offloaded)]

    stepping = torch.optim.Optimizer.profile_hook_step(step)
    return {
        "__init__": init,
        "step": stepping,
        "zero_grad": zero_grad,
        "param_groups": property(param_groups),
    }


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _state_bytes(parameter: Tensor, kind: Any, options: dict[str, Any]) -> int:
    """Return the bytes of state that an optimizer of class `kind` keeps for a parameter.

    They are measured by a step that is not recorded.
    """
    hooks: Any = {name: OrderedDict() for name in _GLOBAL_HOOKS}  # the user's hooks must not see this step
    with (
        _disable_current_modes(),
        torch.enable_grad(),
        all_patched(sys.modules["torch.optim.optimizer"], hooks),
    ):
        copy = nn.Parameter(torch.empty_like(parameter, device="meta"))
        copy.grad = torch.empty_like(copy)
        optimizer = kind([copy], **options)
        optimizer.step()
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(part.nbytes for value in values if isinstance(value, Tensor) for part in parts(value))
