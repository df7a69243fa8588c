"""Record the script's phases, running modules and held tensors for the allocator's history.

Each entry has a position in the history: the number of blocks that torch's statistics count as allocated,
plus the number of blocks that they count as freed. Compiled code runs no hooks, so modules inside of it are
not recorded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from weakref import ref

_COMPILED = "_orig_mod"  # the name of a compiled module inside of torch's wrapper of it
ReadPlaces = Callable[[], "dict[int, int]"]  # returns the position in the history of each GPU in use
_PARAMETERS, _GRADIENTS, _OPTIMIZER, _INPUTS = "parameters", "gradients", "optimizer", "inputs"


class ScriptLogger:
    """A record of phases, modules and held tensors, each at a position in the allocator's history."""

    def __init__(self, torch: Any, read_places: ReadPlaces) -> None:
        self._torch, self._read_places = torch, read_places
        self.restart()
        self._missing = self._attach()

    def restart(self) -> None:
        """Begin an empty record, as in a forked process, which drops its parent's record."""
        self._modules = ModuleNames(self._torch)
        self._running: list[Any] = []
        self._phase, self._in_backward, self._in_step = "setup", False, False
        self._marks: dict[int, list[tuple[int, str, str]]] = {}  # by GPU: position, phase, module
        self._held: dict[int, list[tuple[int, int]]] = {}  # by GPU: position, index into `_tables`
        self._tables: dict[tuple[tuple[int, str, str], ...], int] = {}

    def _attach(self) -> list[str]:
        """Register hooks, and return the parts of training that cannot be recorded with this torch."""
        missing = []
        modules = import_module("torch.nn.modules.module")
        modules.register_module_forward_pre_hook(self._enter)
        modules.register_module_forward_hook(self._leave, always_call=True)
        optimizers = import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_pre_hook(self._begin_optimizer)
        autograd: Any = import_module("torch.autograd")
        graph: Any = import_module("torch.autograd.graph")
        engine = getattr(graph, "_engine_run_backward", None)
        if engine is None:
            missing.append("backward passes")
        else:
            graph._engine_run_backward = autograd._engine_run_backward = self._wrap_engine(engine)
        return missing

    def _wrap_engine(self, engine: Any) -> Any:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            outer, self._in_backward = self._in_backward, True
            self._mark("backward")
            try:
                return engine(*args, **kwargs)
            finally:
                self._in_backward = outer
                if self._in_step and not outer:  # an optimizer's step called this pass and continues
                    self._mark("optimizer")

        return run_backward

    # ---- hooks that torch calls

    def _enter(self, module: Any, args: Any) -> None:
        if self._torch.compiler.is_compiling():
            return
        self._running.append(module)
        if len(self._running) == 1 and not self._in_backward:
            self._begin_forward(module, (args, sys._getframe(1).f_locals.get("kwargs")))
        self._mark(self._phase)

    def _begin_forward(self, module: Any, given: Any) -> None:
        """Record the start of an outermost module's forward pass.

        The input tensors of the call are recorded too. A module without parameters does not start a forward
        pass, since it may belong to the loading of data.
        """
        is_new = self._modules.add(module)
        if self._phase == "forward" or next(module.parameters(), None) is not None:
            self._phase = "forward"
            self._hold([*_inputs(self._torch, given), *(self._modules.holders() if is_new else ())])

    def _leave(self, module: Any, args: Any, result: Any) -> None:
        if self._torch.compiler.is_compiling():
            return
        while self._running and self._running.pop() is not module:
            pass  # an exception left inner modules
        self._mark(self._phase)

    def _begin_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._in_step = True
        self._mark("optimizer")

    def end_step(self, optimizer: Any) -> None:
        """Record the end of an optimizer step, and the tensors that models and the optimizer hold then."""
        self._in_step = False
        self._hold([*self._modules.holders(), *self._modules.holders_of(optimizer)])
        self._mark("inputs")

    def hold_all(self) -> None:
        """Record the tensors that models hold now. `hold_all` is called when an allocation fails."""
        self._hold(list(self._modules.holders()))

    # ---- the record

    def _mark(self, phase: str) -> None:
        self._phase = phase
        module = self._modules.name(self._running[-1]) if self._running else ""
        for device, place in self._read_places().items():
            marks = self._marks.setdefault(device, [])
            if marks and marks[-1][0] == place:
                marks.pop()  # nothing was allocated or freed since
            if not marks or marks[-1][1:] != (phase, module):
                marks.append((place, phase, module))

    def _hold(self, holders: list[tuple[int, str, str]]) -> None:
        if not holders:
            return
        table = self._tables.setdefault(tuple(dict.fromkeys(holders)), len(self._tables))
        for device, place in self._read_places().items():
            self._held.setdefault(device, []).append((place, table))

    def rows(self, device: int) -> dict[str, Any]:
        """Return the phases, modules and held tensors recorded on one GPU, as a JSON object."""
        return {
            "marks": self._marks.get(device, []),
            "held": self._held.get(device, []),
            "tables": list(self._tables),
            "missing": [*self._missing, *_compiled()],
            "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        }


class ModuleNames:
    """A registry of qualified names of modules.

    Names are qualified within the outermost modules that were called. The first outermost module that has
    parameters is the model, whose own name is ""; other outermost modules are named by their class.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._roots: list[Any] = []  # weak references to outermost modules with parameters
        self._names: dict[int, tuple[Any, str]] = {}  # by id: weak reference, name
        self._has_model = False

    def add(self, root: Any) -> bool:
        """Register the names of an outermost module and its submodules; return False if registered before."""
        if self._known(root) is not None:
            return False
        has_parameters = next(root.parameters(), None) is not None
        is_model = has_parameters and not self._has_model
        self._has_model = self._has_model or is_model
        prefix = "" if is_model else type(root).__name__
        for name, module in root.named_modules():
            parts = [prefix, *(part for part in name.split(".") if part != _COMPILED)]
            self._names[id(module)] = ref(module), ".".join(part for part in parts if part)
        if has_parameters:
            self._roots.append(ref(root))
        return True

    def _known(self, module: Any) -> str | None:
        entry = self._names.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def name(self, module: Any) -> str:
        """Return the registered name of a module, or else the name of its class."""
        name = self._known(module)
        return type(module).__name__ if name is None else name

    def _modules(self) -> Iterator[tuple[Any, str]]:
        """Yield (module, name) for all modules of registered models.

        A model is a live outermost module that has parameters.
        """
        for live in self._roots:
            root = live()
            for module in root.modules() if root is not None else ():
                yield module, self.name(module)

    def holders(self) -> Iterator[tuple[int, str, str]]:
        """Yield (address, category, module) for parameters, buffers and gradients of registered models."""
        for module, name in self._modules():
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                yield from _held_by(tensor, _PARAMETERS, name)
            for tensor in module._parameters.values():
                yield from _held_by(getattr(tensor, "grad", None), _GRADIENTS, name)

    def holders_of(self, optimizer: Any) -> Iterator[tuple[int, str, str]]:
        """Yield (address, category, module) for an optimizer's parameters, gradients and state."""
        owners: dict[int, str] = {}
        for module, name in self._modules():
            owners.update((id(one), name) for one in module._parameters.values())
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = owners.get(id(parameter), "")
                yield from _held_by(parameter, _PARAMETERS, name)
                yield from _held_by(parameter.grad, _GRADIENTS, name)
        for parameter, state in list(optimizer.state.items()):
            for tensor in tensors_in(self._torch, state):
                yield from _held_by(tensor, _OPTIMIZER, owners.get(id(parameter), ""))


def _compiled() -> Iterator[str]:
    """Yield the name of an unrecorded part, the modules in compiled code, if torch.compile compiled code."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None and utils.counters["stats"]["unique_graphs"]:
        yield "modules inside of compiled code"


def _inputs(torch: Any, args: Any) -> Iterator[tuple[int, str, str]]:
    """Yield (address, category, "") for the GPU tensors in a call's arguments that need no gradient."""
    for tensor in tensors_in(torch, args):
        if tensor.grad_fn is None and not tensor.requires_grad:
            yield from _held_by(tensor, _INPUTS, "")


def tensors_in(torch: Any, value: Any) -> Iterator[Any]:
    """Yield the tensors in a value, including tensors in nested dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(torch, one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(torch, one)


def _held_by(tensor: Any, category: str, module: str) -> Iterator[tuple[int, str, str]]:
    """Yield (address, category, module) if a tensor, or the local tensor of a DTensor, has GPU memory."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    if tensor is None or not tensor.is_cuda:
        return
    try:
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without a storage
        return
    if address:
        yield address, category, module
