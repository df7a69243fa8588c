"""From a running loop on the `meta` device to the blocks that CUDA's allocator would have been asked for.

A `TorchDispatchMode` sees each operator below autograd. Every storage that an operator's outputs bring to
light is a block; a weak reference on its `UntypedStorage` tells when it dies. Scratch memory that a kernel
takes and gives back comes from the rules of `scratch/`, and where autograd on a real GPU adds in place, so
does the record.
"""

import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _StopRecomputationError

from planner.chip import Chip
from planner.events import Alloc, Event, Free, Mark, Phase, Role, Site, Trace
from planner.trace.details import Details
from planner.trace.recast import Calls
from planner.trace.scratch import (
    CPU_OUTPUTS,
    RULES,
    Held,
    Made,
    Release,
    State,
    Step,
    Workspaces,
    state_of,
)
from planner.trace.scratch.gemm import OPS as BLAS
from planner.trace.scratch.steps import positional
from planner.trace.shapes import run_on_meta

aten = torch.ops.aten

# What an operator gives: called with it, its arguments and the phase of the loop.
Run = Callable[[Any, tuple[Any, ...], dict[str, Any], Phase], Any]


@dataclass(slots=True)
class _Block:
    """A block while it is being recorded: its role is known only later."""

    number: int
    size_bytes: int
    role: Role
    site: int


@dataclass(slots=True)
class _Owner:
    """What a living storage owns; `block` changes when a sum takes over its operand's block."""

    block: _Block
    reference: weakref.ref[Any] | None = None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records blocks while it is the active mode. One recorder makes one trace."""

    def __init__(
        self,
        model: nn.Module,
        chip: Chip,
        details: Details | None = None,
        calls: Calls | None = None,
        run: Run = run_on_meta,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._details = details
        self._calls = calls
        self._run = run
        self.unknown_ops: set[str] = set()
        self.running: str | None = None  # the operator in flight, for error messages
        self._chip = chip
        self._events: list[_Block | int | Mark] = []  # a birth, the number of a block that dies, or a mark
        self._owners: dict[int, _Owner] = {}  # storage identity -> its block
        self._alive: dict[int, _Block] = {}
        self._blocks = 0
        self._sites: dict[tuple[str, str], int] = {}
        self._kinds: dict[Any, str] = {}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._stack: list[tuple[int, str]] = [(0, "")]  # running modules, by identity and name
        self._graph: tuple[list[int], list[str]] = (
            [0],
            [""],
        )  # from this autograd sequence number on, this module
        self._phase = Phase.SETUP
        self._workspaces = Workspaces(chip.capability)
        self._sum: tuple[_Block, _Owner] | None = None  # an addition that may turn out to be in place
        self._closed = False

    # ---- what the loop tells

    def mark(self, step: int, phase: Phase) -> None:
        """From here on, events belong to this phase of this step."""
        self._sum = None
        if phase is Phase.BACKWARD or (phase is Phase.END and torch.is_grad_enabled()):
            # What the forward pass made and is still held when the backward pass starts, or would start.
            for block in self._alive.values():
                if block.role is Role.TEMPORARY:
                    block.role = Role.ACTIVATION
        self._phase = phase
        self._events.append(Mark(step, phase))
        self._closed = phase is Phase.END

    def adopt(self, tensor: Tensor, role: Role, module: str, op: str) -> None:
        """Record a tensor that exists already as a block that is asked for now; a view of a known
        storage is not.
        """
        self._note(tensor, role, op, module)

    def label(self, tensor: Tensor, role: Role) -> None:
        """Say afterwards what the block behind `tensor` was for."""
        owner = self._owners.get(tensor.untyped_storage()._cdata)
        if owner is not None:
            owner.block.role = role

    def place(self) -> str:
        """Where the loop is, in words: the innermost module that runs, or the phase outside of modules."""
        if len(self._stack) > 1:
            name = self._stack[-1][1]
            return f"module '{name}'" if name else "the model's own forward"
        return {Phase.FORWARD: "the loss", Phase.BACKWARD: "the backward pass"}.get(
            self._phase, f"the loop's {self._phase}"
        )

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Follow which module runs, for the sites of blocks and for error messages."""
        before = hooks.register_module_forward_pre_hook(self._enter)
        after = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def finish(self, batch: int, notes: tuple[str, ...] = ()) -> Trace:
        """The trace up to the mark `END`, with every size as it was at this batch."""
        events: list[Event] = []
        for entry in self._events:
            if isinstance(entry, _Block):
                events.append(Alloc(entry.number, entry.size_bytes, 0, entry.role, entry.site))
            elif isinstance(entry, int):
                events.append(Free(entry))
            else:
                events.append(entry)
        sites = tuple(Site(module, op) for module, op in self._sites)
        born = [event.block for event in events if isinstance(event, Alloc)]
        details = () if self._details is None else self._details.of(born)
        return Trace(tuple(events), sites, (batch,), tuple(sorted(self.unknown_ops)), notes, details)

    # ---- what torch tells

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._details is not None:
            self._details.on_operator()
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = self._classify(func)
        if kind == "view":
            return func(*args, **kwargs) if kwargs else func(*args)
        self.running = str(func)
        out = self._run(func, args, kwargs or {}, self._phase)
        self._note_kernel(func, kind, positional(func, args, kwargs) if func in RULES else args, out)
        if func is aten.add.Tensor and self._phase is Phase.BACKWARD and not torch.is_grad_enabled():
            self._expect_sum_in_place(args, out)
        self.running = None
        return out

    def _classify(self, func: Any) -> str:
        if state_of(func) is State.UNKNOWN:
            self.unknown_ops.add(str(func))
        schema = func._schema
        if schema.name in ("aten::resize_", "aten::resize_as_", "aten::set_"):
            return "resizes"
        if schema.name in ("aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"):
            return "view"
        aliases = [value.alias_info for value in schema.returns]
        if all(alias is not None for alias in aliases):  # also where nothing is returned
            return "view" if aliases and not any(alias.is_write for alias in aliases) else "inplace"
        return "creates"

    def _note_outputs(self, func: Any, out: Any) -> None:
        role = Role.INPUT if self._phase is Phase.INPUTS else Role.TEMPORARY
        if isinstance(out, Tensor):
            self._note(out, role, func)
            return
        for tensor in self._new_tensors(func, out):
            self._note(tensor, role, func)

    def _note_resized(self, func: Any, out: Tensor) -> None:
        """A resized storage is a new block; the old one dies once its contents are copied
        (native/cuda/Resize.cpp).
        """
        storage = out.untyped_storage()
        owner = self._owners.get(storage._cdata)
        if owner is None:
            self._note(out, Role.TEMPORARY, func)
        elif owner.block.size_bytes != storage.nbytes():
            old = owner.block
            owner.block = self._birth(storage.nbytes(), old.role, func)
            self._death(old)

    def _note_kernel(self, func: Any, kind: str, args: tuple[Any, ...], out: Any) -> None:
        """Record the outputs of an operator, what its kernel takes beside them, and what cuBLAS keeps."""
        rule = RULES.get(func)
        start = len(self._events)
        held: list[_Block] = []
        outputs: list[Tensor] = []
        if kind == "resizes":
            self._note_resized(func, out)
        elif rule is not None:
            outputs = self._without_known(self._new_tensors(func, out)) if kind == "creates" else []
            held = self._note_steps(func, rule(args, out, self._chip), outputs)
        elif kind == "creates":
            self._note_outputs(func, out)
        for size in self._workspaces.first_use(func, self._phase):
            self._birth(size, Role.WORKSPACE, func)
        while held:
            self._death(held.pop())
        if self._calls is not None and (rule is not None or func in BLAS):
            place = Site(self._where(), str(func))
            self._calls.on_kernel(start, len(self._events), place, func, args, out, outputs)

    def _note_steps(self, func: Any, steps: tuple[Step, ...], outputs: list[Tensor]) -> list[_Block]:
        """Record what a rule wrote down; the result is what the kernel holds until it returns."""
        role = Role.INPUT if self._phase is Phase.INPUTS else Role.TEMPORARY
        held: list[_Block] = []
        coming = iter(outputs)
        if Made.OUTPUT not in steps and Made.REST not in steps:
            steps = (Made.REST, *steps)
        for step in (*steps, Made.REST):
            if step is Made.OUTPUT:
                for tensor in coming:
                    self._note(tensor, role, func)
                    break
            elif step is Made.REST:
                for tensor in coming:
                    self._note(tensor, role, func)
            elif step is Made.RELEASE or isinstance(step, Release):
                for _ in range(step.blocks if isinstance(step, Release) else len(held)):
                    self._death(held.pop())
            elif isinstance(step, Held):
                if step.size_bytes:  # no rule gives back one of no bytes
                    held.append(self._birth(step.size_bytes, Role.WORKSPACE, func))
            elif step:
                self._death(self._birth(step, Role.WORKSPACE, func))
        return held

    def _new_tensors(self, func: Any, out: Any) -> list[Tensor]:
        """The tensors of a result in order, those left out that a CUDA kernel keeps on the CPU."""
        if isinstance(out, Tensor):
            return [out]
        on_cpu = CPU_OUTPUTS.get(func, ())
        found: list[Tensor] = []
        for position, item in enumerate(out if isinstance(out, (tuple, list)) else ()):
            if position not in on_cpu and item is not None:
                found.extend(self._new_tensors(None, item))
        return found

    def _without_known(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those that are no views of blocks that live already, and one of each storage."""
        found: dict[int, Tensor] = {}
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self._owners:
                found.setdefault(key, tensor)
        return list(found.values())

    def _note(self, tensor: Tensor, role: Role, op: Any, module: str | None = None) -> None:
        if tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._owners or storage.nbytes() == 0:
            return
        owner = _Owner(self._birth(storage.nbytes(), role, op, module))
        if self._details is not None:
            self._details.on_tensor(owner.block.number, tensor)

        def died(_: Any) -> None:
            del self._owners[key]
            self._death(owner.block)

        owner.reference = weakref.ref(storage, died)
        self._owners[key] = owner

    def _birth(self, size_bytes: int, role: Role, op: Any, module: str | None = None) -> _Block:
        self._sum = None
        key = (self._where() if module is None else module, str(op))
        block = _Block(self._blocks, size_bytes, role, self._sites.setdefault(key, len(self._sites)))
        self._blocks += 1
        self._alive[block.number] = block
        self._events.append(block)
        if self._details is not None:
            self._details.on_birth(block.number)
        return block

    def _death(self, block: _Block) -> None:
        if self._closed:
            return
        if self._sum is not None and self._sum_was_in_place(block):
            return
        del self._alive[block.number]
        self._events.append(block.number)

    # ---- gradients that a GPU adds in place
    # -------------------------------------------------------------------

    def _expect_sum_in_place(self, args: tuple[Any, ...], out: Tensor) -> None:
        """Remember an addition of gradients, which may reuse its first operand on a real GPU.

        autograd/input_buffer.cpp accumulates in place where it holds the last reference to a dense tensor,
        but never under a dispatch mode or on meta (ATen/TensorSubclassLikeUtils.h). It held the last
        reference exactly if the operand's storage dies before anything else happens.
        """
        operand = args[0]
        if not isinstance(operand, Tensor) or operand.dtype != out.dtype or operand.shape != out.shape:
            return
        old = self._owners.get(operand.untyped_storage()._cdata)
        new = self._owners.get(out.untyped_storage()._cdata)
        if old is None or new is None or self._events[-1] is not new.block:
            return
        if old.block.size_bytes == new.block.size_bytes:
            self._sum = (old.block, new)

    def _sum_was_in_place(self, dying: _Block) -> bool:
        assert self._sum is not None
        old, sum_owner = self._sum
        self._sum = None
        if dying is not old:
            return False
        self._events.pop()  # the birth of the sum: it lives on in its operand's block
        del self._alive[sum_owner.block.number]
        sum_owner.block = old
        return True

    # ---- where

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self._stack.append((id(module), self._names.get(id(module), type(module).__name__)))
        self._mark_graph()

    def _leave(self, module: nn.Module, _args: Any, out: Any) -> None:
        error = sys.exception() if out is None else None
        if error is not None and not isinstance(error, _StopRecomputationError):
            return  # the module raised, and an error message names the place; a checkpoint only stops early
        while self._stack.pop()[0] != id(module):
            pass  # a module inside this one raised, and this one went on
        self._mark_graph()

    def _mark_graph(self) -> None:
        numbers, names = self._graph
        numbers.append(torch._C._autograd._get_sequence_nr())
        names.append(self._stack[-1][1])

    def _where(self) -> str:
        """The module that runs; in the backward pass, the one whose forward made the node that runs."""
        if self._phase is not Phase.BACKWARD or len(self._stack) > 1:
            return self._stack[-1][1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        numbers, names = self._graph
        return names[bisect_right(numbers, node._sequence_nr()) - 1]
