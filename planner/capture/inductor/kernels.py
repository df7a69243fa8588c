"""Replace inductor's Triton kernels by objects that only allocate memory for autotuning.

`CachingAutotuner` (torch/_inductor/runtime/triton_heuristics.py) times the configurations of a kernel at its
first launch, if there are several. Each timed launch gets clones of the arguments that the kernel changes. In
inference and in backward passes, arguments whose clones would raise the peak are copied to the CPU, not
cloned.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from torch import Tensor
from torch._inductor.runtime import hints, triton_heuristics

from planner.capture.inductor.timing_memory import GpuMemory
from planner.capture.patching import patched


class Tuning(Struct, frozen=True):
    """The arguments of a kernel, and the properties that decide what its first launch allocates."""

    arguments: tuple[str, ...]  # names of all arguments, in order
    changed: frozenset[str]  # names of arguments that the kernel changes
    is_timed: bool  # whether there are several configurations
    spares_memory: bool  # whether clones that would raise the peak are left out


class _Config:
    """The stand-in for `triton.Config`, a configuration of a kernel."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **more: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        self.__dict__.update(more)


def tuning_of(source: str) -> Tuning:
    """Derive the tuning properties of a kernel by running inductor's own heuristics on its source."""
    function, call = _function_of(ast.parse(source))
    names = tuple(argument.arg for argument in function.args.args)
    assert isinstance(call.func, ast.Attribute)
    found: list[Tuning] = []

    def keep(size_hints: Any, configs: list[Any], triton_meta: Any, heuristic_type: Any, **more: Any) -> Any:
        inductor_meta = more.get("inductor_meta") or {}
        reductions = (hints.HeuristicType.REDUCTION, hints.HeuristicType.PERSISTENT_REDUCTION)
        if size_hints is not None and heuristic_type in reductions:
            configs = triton_heuristics._enforce_reduction_config_block_minimums(
                configs, size_hints, inductor_meta
            )
        changed = frozenset(inductor_meta.get("mutated_arg_names", ()))
        count = len(triton_heuristics.unique_configs(configs))
        found.append(Tuning(names, changed, count > 1, bool(inductor_meta.get("optimize_mem", True))))
        return lambda function: function

    with (
        patched(triton_heuristics, "cached_autotune", keep),
        patched(triton_heuristics, "Config", _Config),
        patched(triton_heuristics, "InductorConfig", _Config),
    ):
        arguments = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        getattr(triton_heuristics, call.func.attr)(*map(_value, call.args), **arguments)
    return found[0]


def _function_of(tree: ast.Module) -> tuple[ast.FunctionDef, ast.Call]:
    """Return a kernel's function, and the decorator call that names its heuristic.

    Helper functions in the source, which combine values of a scan, have no such decorator.
    """
    return next(
        (node, decorator)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
    )


def _value(node: ast.expr) -> Any:
    names = {**vars(hints), "__file__": "kernel.py", "AttrsDescriptor": lambda **_: None}
    return eval(compile(ast.Expression(node), "kernel", "eval"), names)


@dataclass(slots=True)
class Kernel:
    """The stand-in for a Triton kernel of generated code. It computes nothing."""

    tuning: Tuning
    memory: GpuMemory
    _was_launched: bool = False

    def run(self, *arguments: Any, stream: Any = None, **_: Any) -> None:
        """Allocate and free, at the first launch, the memory of autotuning, if any.

        A kernel with a single configuration is not tuned.
        """
        if self._was_launched:
            return
        self._was_launched = True
        if self.tuning.is_timed:
            self.memory.time(self._clones(arguments))

    def _clones(self, arguments: Sequence[Any]) -> Callable[[], list[Tensor]]:
        tuning = self.tuning
        budget = self.memory.bytes_below_peak() if tuning.spares_memory else None
        sizes: list[int] = []
        for name, argument in zip(tuning.arguments, arguments, strict=False):
            if name not in tuning.changed:
                continue
            size = _storage_length(argument) * argument.element_size()
            if budget is not None:
                if size > budget:
                    continue
                budget -= size
            sizes.append(size)
        return lambda: [self.memory.allocate(size) for size in sizes]


def _storage_length(tensor: Tensor) -> int:
    reach = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return 1 + sum(reach) if tensor.numel() else 0


@dataclass(slots=True)
class Kernels:
    """A cache of kernels, keyed by source code."""

    memory: GpuMemory
    _by_source: dict[str, Kernel] = field(default_factory=dict)

    def get(self, source: str) -> Kernel:
        """Return the kernel with a source code, created at the first request."""
        if source not in self._by_source:
            self._by_source[source] = Kernel(tuning_of(source), self.memory)
        return self._by_source[source]
