"""Run torch.compile in a capture.

torch's compiler runs unchanged, and compiled code runs on meta tensors. The module uses private functions of
torch 2.13; other versions are refused.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.types import ConvertFrameReturn, GuardFilterEntry
from torch._functorch import partitioners
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from planner.capture.cuda.autocast import mode as autocast
from planner.capture.cuda.operators.semantics import Suspended
from planner.capture.inductor.attention import attention_of
from planner.capture.inductor.constants import constants_on_cpu
from planner.capture.inductor.cuda_graphs import CudaGraphs
from planner.capture.inductor.fakes import fakes_on_gpu
from planner.capture.inductor.generated_code import load_wrapper
from planner.capture.inductor.gpu import gpu_of_inductor, gpu_properties
from planner.capture.inductor.kernels import Kernels
from planner.capture.inductor.padding import PaddingTimer
from planner.capture.inductor.timing_memory import GpuMemory
from planner.capture.models.libraries import quiet
from planner.capture.patching import patched
from planner.capture.recorder.recorder import Recorder
from planner.errors import ModelError
from planner.program import NEWEST_TORCH, format_torch_version, torch_version_of

_Inductor = torch._TorchCompileInductorWrapper
_IDENTITIES = ("ID_MATCH", "FUNCTION_MATCH", "BUILTIN_MATCH", "CLOSURE_MATCH")
_TIMED = {"max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning"}
_PLANNER = str(Path(__file__).parents[2])  # the planner's code runs within each operator
_TRITON_SINCE = (7, 0)


class Compiler:
    """The replacements that make torch.compile work in one capture."""

    def __init__(self, recorder: Recorder, suspended: Suspended) -> None:
        """Prepare to compile for the recorder's GPU.

        `suspended` opens a context in which no function of torch is replaced. Raises ModelError if the
        installed torch is not `NEWEST_TORCH`, or if Triton does not support the GPU.
        """
        if torch_version_of(torch.__version__) != NEWEST_TORCH:
            installed, newest = torch.__version__, format_torch_version(NEWEST_TORCH)
            raise ModelError(
                f"torch.compile is planned with torch {newest}, not {installed}; install {newest}"
            )
        if recorder.target.capability < _TRITON_SINCE:
            raise ModelError("torch.compile: Triton needs compute capability 7.0; plan without --compile")
        memory = GpuMemory(recorder, gpu_properties(recorder.target).L2_cache_size)
        self._recorder = recorder
        self._suspended = suspended
        self._kernels, self._padding, self._graphs = Kernels(memory), PaddingTimer(memory), CudaGraphs(memory)
        self._is_compiling = False
        self._timed: set[str] = set()  # options set by user code that are not planned

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make torch.compile work for meta tensors inside the context."""
        frames = convert_frame.CatchErrorsWrapper
        torch._dynamo.reset()
        try:
            with (
                patched(frames, "__call__", self._compiling(frames.__call__)),
                patched(convert_frame, "CheckFunctionManager", self._guarding(CheckFunctionManager)),
                patched(compile_fx, "compile_fx_backward", self._compiling(compile_fx.compile_fx_backward)),
                patched(_Inductor, "__call__", self._without_timed(_Inductor.__call__)),
                self._graphs.installed(),
            ):
                yield
        finally:
            torch._dynamo.reset()

    def notes(self) -> tuple[str, ...]:
        """Return notes on parts that are not planned: timed kernels, and products that a GPU might pad."""
        notes = []
        if self._timed:
            notes.append(
                f"torch.compile is planned without {', '.join(sorted(self._timed))} (mode='max-autotune'): "
                "which templates are fastest is not known, and those may take other workspaces"
            )
        if self._padding.count:
            notes.append(
                "inductor times matrix products with and without padded operands: they are planned without, "
                "and a GPU on which padding is faster also holds the padded copies"
            )
        return tuple(notes)

    def _without_timed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version of the backend's `__call__` that drops options that time kernels.

        The names of dropped options are kept for `notes`.
        """

        def call(backend: Any, *args: Any, **kwargs: Any) -> Any:
            timed = {name for name, value in backend.config.items() if name in _TIMED and value}
            self._timed |= timed
            plainly = {name: value for name, value in backend.config.items() if name not in timed}
            with patched(backend, "config", plainly):
                return plain(backend, *args, **kwargs)

        return call

    def _guarding(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a dynamo guard builder that runs in the recorder and drops guards on torch's functions.

        Guards compare a tensor's dispatch keys, which include the keys of the thread, and are checked inside
        the recorder. Guards on the identity of torch's functions are dropped, since those functions are
        replaced when the guards are checked.
        """

        def make_guards(
            code: Any, graph: Any, entries: Any = None, on_fail: Any = None, keep: Any = None, **more: Any
        ) -> Any:
            def kept(guards: Sequence[GuardFilterEntry]) -> Sequence[bool]:
                by_user = [True] * len(guards) if keep is None else keep(guards)
                return [kept and not _is_of_torch(guard) for kept, guard in zip(by_user, guards, strict=True)]

            with self._recorder, autocast.included():
                return plain(code, graph, entries, on_fail, kept, **more)

        return make_guards

    def _compiling(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version of torch's compiling function `plain` that compiles as on the planned GPU.

        `plain` compiles a frame or a backward pass. Frames of the planner's own code are not compiled.
        """

        def compile_for_gpu(*args: Any, **kwargs: Any) -> Any:
            if self._is_compiling:
                return plain(*args, **kwargs)
            if any(map(_is_of_planner, args[1:2])):  # the frame, if an operator runs outside of a graph
                return ConvertFrameReturn()
            self._is_compiling = True
            try:
                with (
                    warnings.catch_warnings(),
                    quiet(),
                    _disable_current_modes(),
                    self._suspended(),
                    fakes_on_gpu(),
                    constants_on_cpu(),
                    gpu_of_inductor(self._recorder.target),
                    attention_of(self._recorder.target),
                    self._padding.installed(),
                    self._waits_recorded(),
                    patched(partitioners, "functionalize_rng_ops", _random_as_is),
                    patched(GraphLowering, "compile_to_module", self._loading()),
                    config.patch(force_disable_caches=True, compile_threads=1),
                ):
                    warnings.simplefilter("ignore")  # torch's warnings to users of a GPU
                    return plain(*args, **kwargs)
            finally:
                self._is_compiling = False

        return compile_for_gpu

    @contextmanager
    def _waits_recorded(self) -> Iterator[None]:
        """Record, inside the context, AOTAutograd's waits for collectives whose results are graph inputs."""
        module = sys.modules.get("torch.distributed._functional_collectives")
        if module is None:
            yield
            return
        plain = module.AsyncCollectiveTensor.trigger_wait

        def trigger_wait(tensor: Any) -> Any:
            if isinstance(tensor.elem, FakeTensor):
                return plain(tensor)
            with self._recorder:
                return plain(tensor)

        with patched(module.AsyncCollectiveTensor, "trigger_wait", trigger_wait):
            yield

    def _loading(self) -> Callable[[GraphLowering], Any]:
        def compile_to_module(graph: GraphLowering) -> Any:
            code, _ = graph.codegen()
            constants = {**graph.constants, **graph.torchbind_constants}
            return load_wrapper(code.value, constants, self._kernels)

        return compile_to_module


def _random_as_is(joint: Any, forward: Any, backward: Any, saved_sizes: int) -> tuple[Any, Any]:
    """Return the forward and the backward graph unchanged, in place of `functionalize_rng_ops`.

    Their random operators stay. On a GPU, generators that take no memory repeat the random numbers in the
    backward pass.
    """
    return forward, backward


def _is_of_planner(frame: Any) -> bool:
    code = getattr(frame, "f_code", None)
    return code is not None and code.co_filename.startswith(_PLANNER)


def learn_names_of_torch() -> None:
    """Make dynamo build its table of torch's functions now, from torch's own functions, not replacements.

    The table is built once per process, and finds functions by their identity.
    """
    get_torch_obj_rule_map()


def _is_of_torch(guard: GuardFilterEntry) -> bool:
    """Return whether a guard checks the identity of a torch function."""
    is_function = callable(guard.value) and not isinstance(guard.value, type | torch.nn.Module)
    module = str(getattr(guard.value, "__module__", None) or "torch")  # builtins have no module
    return guard.guard_type in _IDENTITIES and is_function and module.partition(".")[0] == "torch"
