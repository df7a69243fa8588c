"""From a running loop on the `meta` device to the blocks that CUDA's allocator would have been asked for.

A `TorchDispatchMode` sees each operator below autograd. Every storage that an operator's outputs bring to
light is a block; a weak reference on its `UntypedStorage` tells when it dies. Scratch memory that a kernel
takes and gives back comes from the rules of `scratch/`, and where autograd on a real GPU adds in place, so
does the record.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.meta_kernels.reductions import run_on_meta
from planner.capture.recorder.allocation_log import Block, BlockLog, Owner
from planner.capture.recorder.module_tracker import ModuleScopes
from planner.capture.recorder.provenance import Details
from planner.capture.symbolic.kernel_calls import Calls, freeze
from planner.capture.workspaces.nn.convolution import UNKNOWN as OF_CUDNN
from planner.capture.workspaces.registry import (
    CPU_OUTPUTS,
    Held,
    Made,
    Release,
    ReleaseBeneath,
    Rule,
    Search,
    State,
    Step,
    Trial,
    Workspaces,
    rule_of,
    state_of,
)
from planner.capture.workspaces.steps import positional
from planner.capture.workspaces.tensor.gemm import OPS as BLAS
from planner.program import Alloc, Category, Phase, Site, Target, Trace

aten = torch.ops.aten

# What an operator gives: called with it, its arguments and the phase of the loop.
Run = Callable[[Any, tuple[Any, ...], dict[str, Any], Phase], Any]


@dataclass(frozen=True, slots=True)
class _Operator:
    """What is asked of an operator whenever it runs."""

    func: Any
    name: str
    kind: str  # "view", "inplace", "resizes" or "creates"
    rule: Rule | None
    uses_blas: bool


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records blocks while it is the active mode. One recorder makes one trace."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would wrap each call so that its compiler skips it, but here nothing is compiled, and the
        wrapper takes 2 us and the compiler's import.
        """
        return False

    def __init__(
        self,
        model: nn.Module,
        chip: Target,
        details: Details | None = None,
        calls: Calls | None = None,
        run: Run = run_on_meta,
        cublas_config: str = "",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._details = details
        self._calls = calls
        self._run = run
        self.unknown_ops: set[str] = set()
        self.running: str | None = None  # the operator in flight, for error messages
        self._chip = chip
        self._log = BlockLog(details)
        self._owners: dict[int, Owner] = {}  # storage identity -> its block
        self._operators: dict[int, _Operator] = {}  # by identity: their own hash is slow
        self._scopes = ModuleScopes(model)
        self._phase = Phase.SETUP
        self._workspaces = Workspaces(chip.capability, cublas_config)
        self._searched: set[str] = set()  # calls for which a library has timed all its ways

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability whose kernels take what is recorded."""
        return self._chip.capability

    # ---- what the loop tells

    def mark(self, step: int, phase: Phase) -> None:
        """From here on, events belong to this phase of this step."""
        if phase is Phase.BACKWARD or (phase is Phase.END and torch.is_grad_enabled()):
            # What the forward pass made and is still held when the backward pass starts, or would start.
            self._log.keep_for_backward()
        self._phase = phase
        self._log.mark(step, phase)

    def adopt(self, tensor: Tensor, role: Category, module: str, op: str) -> None:
        """Record a tensor that exists already as a block that is asked for now; a view of a known
        storage is not.
        """
        self._note(tensor, role, op, module)

    def label(self, tensor: Tensor, role: Category) -> None:
        """Say afterwards what the block behind `tensor` was for."""
        owner = self._owners.get(tensor.untyped_storage()._cdata)
        if owner is not None:
            owner.block.role = role

    def place(self) -> str:
        """Where the loop is, in words: the innermost module that runs, or the phase outside of modules."""
        return self._scopes.place_in(self._phase)

    def watching_modules(self) -> AbstractContextManager[None]:
        """Follow which module runs, for the sites of blocks and for error messages."""
        return self._scopes.watching()

    def living_blocks(self) -> set[int]:
        """The numbers of the blocks whose storages live right now."""
        return {owner.block.number for owner in self._owners.values()}

    def finish(self, batch: int, notes: tuple[str, ...] = ()) -> Trace:
        """The trace up to the mark `END`, with every size as it was at this batch."""
        events = self._log.events()
        born = [event.block for event in events if isinstance(event, Alloc)]
        known = self._details
        details, asked = ((), ()) if known is None else (known.of(born), known.asked_of(born))
        unknown = tuple(sorted(self.unknown_ops))
        return Trace(events, self._log.sites(), (batch,), unknown, notes, details, asked)

    # ---- what torch tells

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._details is not None:
            self._details.on_operator()
        op = self._operators.get(id(func)) or self._learn(func)
        kind = op.kind
        if kind == "view":
            return func(*args, **kwargs) if kwargs else func(*args)
        self.running = op.name
        phase = self._phase
        out = self._run(func, args, kwargs or {}, phase)
        if op.rule is not None or op.uses_blas or kind == "resizes":
            self._note_kernel(op, args if op.rule is None else positional(func, args, kwargs), out)
        elif kind == "creates":
            self._note_outputs(op, out)
        if func is aten.add.Tensor and phase is Phase.BACKWARD and not torch.is_grad_enabled():
            self._expect_sum_in_place(args, out)
        self.running = None
        return out

    def _learn(self, func: Any) -> _Operator:
        op = _Operator(func, str(func), self._classify(func), rule_of(func), func in BLAS)
        self._operators[id(func)] = op
        return op

    def _classify(self, func: Any) -> str:
        if state_of(func) is State.UNKNOWN and not (
            self._chip.conv_workspace_query is not None and func in OF_CUDNN
        ):
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

    def _note_outputs(self, op: _Operator, out: Any) -> None:
        role = Category.INPUT if self._phase is Phase.INPUTS else Category.TEMPORARY
        if isinstance(out, Tensor):
            self._note(out, role, op.name)
            return
        for tensor in self._new_tensors(op.func, out):
            self._note(tensor, role, op.name)

    def _note_resized(self, op: _Operator, out: Tensor) -> None:
        """A resized storage is a new block; the old one dies once its contents are copied
        (native/cuda/Resize.cpp).
        """
        storage = out.untyped_storage()
        owner = self._owners.get(storage._cdata)
        if owner is None:
            self._note(out, Category.TEMPORARY, op.name)
        elif owner.block.size_bytes != storage.nbytes():
            old = owner.block
            owner.block = self._birth(storage.nbytes(), old.role, op.name)
            self._log.death(old)

    def _note_kernel(self, op: _Operator, args: tuple[Any, ...], out: Any) -> None:
        """Record the outputs of an operator, what its kernel takes beside them, and what cuBLAS keeps."""
        start = len(self._log.entries)
        held: list[Block] = []
        outputs: list[Tensor] = []
        if op.kind == "resizes":
            self._note_resized(op, out)
        elif op.rule is not None:
            if op.kind == "creates":
                outputs = self._without_known(self._new_tensors(op.func, out))
            steps = op.rule(args, out, self._chip)
            held = self._note_steps(op, self._searched_once(op, args, steps), outputs)
        elif op.kind == "creates":
            self._note_outputs(op, out)
        if op.uses_blas:
            for size in self._workspaces.first_use(op.func, args, self._phase):
                self._birth(size, Category.WORKSPACE, op.name)
        while held:
            self._log.death(held.pop())
        if self._calls is not None and (op.rule is not None or op.uses_blas):
            place = Site(self._scopes.name_in(self._phase), op.name)
            self._calls.on_kernel(start, len(self._log.entries), place, op.func, args, out, outputs)

    def _searched_once(
        self, op: _Operator, args: tuple[Any, ...], steps: tuple[Step, ...]
    ) -> tuple[Step, ...]:
        """With each search as a trial in the first call of its kind, without it afterwards."""
        if not any(isinstance(step, Search) for step in steps):
            return steps
        kind = repr((op.name, freeze(args)))
        again = kind in self._searched
        self._searched.add(kind)
        found: list[Step] = []
        for step in steps:
            if not isinstance(step, Search):
                found.append(step)
            elif not again:
                found.append(Trial(step.size_bytes, step.why))
        return tuple(found)

    def _note_steps(self, op: _Operator, steps: tuple[Step, ...], outputs: list[Tensor]) -> list[Block]:
        """Record what a rule wrote down; the result is what the kernel holds until it returns."""
        role = Category.INPUT if self._phase is Phase.INPUTS else Category.TEMPORARY
        held: list[Block] = []
        coming = list(outputs)
        if not {Made.OUTPUT, Made.SECOND, Made.REST} & {step for step in steps if isinstance(step, Made)}:
            steps = (Made.REST, *steps)
        for step in (*steps, Made.REST):
            if step is Made.OUTPUT or step is Made.SECOND:
                place = 1 if step is Made.SECOND and len(coming) > 1 else 0
                if coming:
                    self._note(coming.pop(place), role, op.name)
            elif step is Made.REST:
                while coming:
                    self._note(coming.pop(0), role, op.name)
            elif step is Made.RELEASE or isinstance(step, Release):
                for _ in range(step.blocks if isinstance(step, Release) else len(held)):
                    self._log.death(held.pop())
            elif isinstance(step, ReleaseBeneath):
                for block in reversed(held[-1 - step.blocks : -1]):
                    self._log.death(block)
                del held[-1 - step.blocks : -1]
            elif isinstance(step, Held):
                if step.size_bytes:  # no rule gives back one of no bytes
                    held.append(self._birth(step.size_bytes, Category.WORKSPACE, op.name))
            elif isinstance(step, Trial):
                block = self._birth(step.size_bytes, Category.WORKSPACE, op.name)
                block.optional = True
                if self._details is not None and step.why is not None:
                    self._details.on_workspace(step.why(block.number))
                self._log.death(block)
            elif isinstance(step, int) and step:
                self._log.death(self._birth(step, Category.WORKSPACE, op.name))
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

    def _note(self, tensor: Tensor, role: Category, op: str, module: str | None = None) -> None:
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._owners:
            return
        size_bytes = storage.nbytes()
        if size_bytes == 0:
            return
        owner = Owner(storage, self._died)
        owner.key = key
        owner.block = self._birth(size_bytes, role, op, module)
        self._owners[key] = owner
        if self._details is not None:
            self._details.on_tensor(owner.block.number, tensor)

    def _died(self, owner: Any) -> None:
        del self._owners[owner.key]
        self._log.death(owner.block)

    def _birth(self, size_bytes: int, role: Category, op: str, module: str | None = None) -> Block:
        where = self._scopes.name_in(self._phase) if module is None else module
        return self._log.birth(size_bytes, role, op, where)

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
        if old is not None and new is not None:
            self._log.expect_sum_in_place(old.block, new)
