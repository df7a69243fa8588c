"""Run code of torch.compile as eager code, and record the names of the compiled functions that are called.

All forms of `torch.compile` (a wrapped module, `Module.compile`, a decorated function) pass through the one
function of dynamo that consults the stance (torch/_dynamo/eval_frame.py, `_callback_from_stance`).
TorchScript's functions and methods, scripted or traced, pass through `__call__` of their two classes. Both
entry points are watched, wherever the model stores its compiled code.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from planner.capture.cuda.threads import caller_frame
from planner.capture.patching import patched

_MOST_NAMES = 4  # most names that a note lists


@dataclass(slots=True)
class CompiledCalls:
    """Names of the called compiled functions and modules, in the order of their first calls."""

    by_dynamo: dict[str, None] = field(default_factory=dict)
    by_torchscript: dict[str, None] = field(default_factory=dict)

    def notes(self) -> tuple[str, ...]:
        """Return a note for dynamo and a note for TorchScript, each only if code that it compiled was called.

        The notes say how a compiled run differs from the planned run.
        """
        notes = []
        if self.by_dynamo:
            notes.append(
                f"torch.compile is planned as eager code ({_listed(self.by_dynamo)}): inductor fuses "
                "operators and usually keeps fewer activations, so that a compiled run usually takes less; "
                "but compiling it takes a buffer as large as the GPU's L2 cache, which is more for a small "
                "model, and with mode='reduce-overhead' its CUDA graphs hold private memory pools; --compile "
                "plans it compiled"
            )
        if self.by_torchscript:
            notes.append(
                f"TorchScript is planned operator by operator ({_listed(self.by_torchscript)}): on a GPU its "
                "executor differentiates and fuses such code after the first calls and usually keeps fewer "
                "activations"
            )
        return tuple(notes)


@contextmanager
def watch_compiled(calls: CompiledCalls) -> Iterator[None]:
    """Run code of torch.compile as eager code inside the context, and add names of called code to `calls`.

    The names are of compiled functions and modules, TorchScript's too. A compiler would trace the recorder as
    well.
    """
    with ExitStack() as stack:
        _watch_torchscript(calls, stack)
        if "torch._dynamo" in sys.modules:
            _watch_dynamo(calls, stack)
        else:  # it takes two seconds to import, and few models compile anything
            _watch_first_use(calls, stack)
        yield


def _watch_dynamo(calls: CompiledCalls, stack: ExitStack) -> None:
    import torch._dynamo.eval_frame as eval_frame

    decide: Callable[[Any], Any] = eval_frame._callback_from_stance

    def noting(callback: Any) -> Any:
        if callback not in (None, False):  # None: the code was excluded from compilation
            caller = caller_frame().f_locals
            if "fn" in caller:
                calls.by_dynamo[_name_of(caller["fn"])] = None
        return decide(callback)

    stack.enter_context(patched(eval_frame, "_callback_from_stance", noting))
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    # The global hooks are the recorder's, which may safely run once more.
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")


def _watch_first_use(calls: CompiledCalls, stack: ExitStack) -> None:
    """Start to watch dynamo at the first call of `torch.compile`, which imports dynamo."""
    compile_ = torch.compile

    def compile_noting(*args: Any, **kwargs: Any) -> Any:
        torch.compile = compile_
        _watch_dynamo(calls, stack)
        return compile_(*args, **kwargs)

    stack.enter_context(patched(torch, "compile", compile_noting))


def _watch_torchscript(calls: CompiledCalls, stack: ExitStack) -> None:
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        stack.enter_context(patched(kind, "__call__", _noting_call(kind.__call__, calls)))


def _noting_call(call: Callable[..., Any], calls: CompiledCalls) -> Callable[..., Any]:
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(self, "owner", None)  # the module, if `self` is a method
        name = self.name if owner is None else _plain_type(owner)
        calls.by_torchscript[name] = None
        return call(self, *args, **kwargs)

    return noting


def _plain_type(script_module: Any) -> str:
    """Return the class name of a scripted module without TorchScript's prefix."""
    qualified = str(script_module._type().name() or "a module")
    return qualified.rpartition(".")[2]


def _name_of(function: Any) -> str:
    """Return the class name of a compiled module, or the qualified name of a compiled function."""
    if getattr(function, "__name__", "") == "inner":  # torch puts another wrapper around its own modules
        function = inspect.getclosurevars(function).nonlocals.get("fn", function)
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module):
        return type(owner).__name__
    if inspect.isbuiltin(function):
        return function.__name__
    return str(getattr(function, "__qualname__", type(function).__name__))


def _listed(names: dict[str, None]) -> str:
    shown = ", ".join(list(names)[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
