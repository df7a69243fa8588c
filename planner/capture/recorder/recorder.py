"""Record the blocks that a loop on `meta` would allocate on CUDA.

They are requested from CUDA's caching allocator. A `TorchDispatchMode` sees each operator below autograd.
Each new storage among an operator's outputs is a block, which is freed when a weak reference to its
`UntypedStorage` dies. The workspaces of kernels come from the rules of `planner.capture.workspaces`. If
autograd on a GPU adds gradients in place, the log does so too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.arguments import leaves_of
from planner.capture.beneath_autograd import as_without_gradients, is_composite
from planner.capture.cuda.devices.host_tensors import HostTensors, Side, innermost
from planner.capture.cuda.streams import Streams
from planner.capture.meta_kernels.run import MetaRunner
from planner.capture.meta_kernels.strides import is_dense
from planner.capture.recorder.allocation_log import AllocationLog, Block, StorageRef
from planner.capture.recorder.host_copies import staging_copies
from planner.capture.recorder.module_tracker import ModuleTracker
from planner.capture.recorder.operators import Operator, OutputKind, inspect_operator
from planner.capture.recorder.pending_collectives import PendingCollectives
from planner.capture.recorder.provenance import ProvenanceCollector
from planner.capture.symbolic.kernel_calls import RecordedCall, to_meta
from planner.capture.workspaces._rule import positional_args
from planner.capture.workspaces.nn.volumes import note_on_call
from planner.capture.workspaces.ops import KernelOp, Ops, Outputs, answer_convolutions
from planner.capture.workspaces.tensor.gemm import CublasWorkspaces, uses_cublas
from planner.capture.wrapped import calls_operators_itself, is_wrapped, parts
from planner.program import (
    GRAPH_POOL,
    Alloc,
    Category,
    ConvWorkspace,
    Fact,
    OpKind,
    Phase,
    Site,
    Target,
    Trace,
)

aten = torch.ops.aten
_META = torch.device("meta")

# Runs an operator on the meta device: called with it, its arguments and the phase of the loop.
Run = Callable[[Any, tuple[Any, ...], dict[str, Any], Phase], Any]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records the blocks of one trace."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since a recorder compiles nothing.

        Torch would otherwise wrap each call so that its compiler skips it, which takes 2 us and the
        compiler's import.
        """
        return False

    def __init__(
        self,
        model: nn.Module,
        target: Target,
        provenance: ProvenanceCollector | None = None,
        calls: list[RecordedCall] | None = None,
        run: Run | None = None,
        cublas_config: str = "",
        host: HostTensors | None = None,
        streams: Streams | None = None,
        most_blocks: float = inf,
    ) -> None:
        """Set up the recorder of a model's loop on a target GPU.

        `host` are the meta tensors that take no memory of the GPU, `streams` the streams of the process.
        `calls` collects calls of operators that have workspace rules or use cuBLAS. The operator that
        allocates more blocks than `most_blocks` raises BatchTooLargeError.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.host = HostTensors() if host is None else host
        self._streams = Streams() if streams is None else streams
        self._provenance = provenance
        self._calls = calls
        self._run = MetaRunner(target.capability).run if run is None else run
        self.unknown_ops: set[str] = set()
        self.facts: set[Fact] = set()  # of the trace
        self.running: str | None = None  # the operator in flight, for error messages
        self.target = target
        self._log = AllocationLog(provenance, most_blocks)
        self._storages: dict[int, StorageRef] = {}  # by identity of the storage
        self._operators: dict[int, Operator] = {}  # by identity, since an operator's own hash is slow
        self.modules = ModuleTracker(model)
        self.phase = Phase.SETUP
        self._cublas = CublasWorkspaces(target, cublas_config)
        self._cublas_blocks: list[Block] = []
        self._pending = PendingCollectives()
        self._pool: int | None = None  # number of the private pool in use; None if none is
        self._conv_workspaces: dict[int, ConvWorkspace] = {}  # by block
        self._notes: dict[str, None] = {}  # notes on kernels
        self._autotuned: set[str] = set()  # signatures of calls whose engines a library has timed

    # ---- called by the loop

    def start_phase(self, step: int, phase: Phase) -> None:
        """Start a phase of a step; when the backward pass starts, living temporaries become activations.

        They also do when the loop ends, unless gradients are off.
        """
        if phase is Phase.BACKWARD or (phase is Phase.END and torch.is_grad_enabled()):
            # Activations are alive when the backward pass starts, or would start if the loop had one.
            self._log.keep_for_backward()
        self.phase = phase
        self._log.start_phase(step, phase)

    def record_tensor(self, tensor: Tensor, category: Category, op: str, module: str | None = None) -> None:
        """Record a meta tensor as allocated now, unless its storage is recorded, empty or on the CPU."""
        if is_wrapped(tensor):
            for one in parts(tensor):
                self.record_tensor(one, category, op, module)
            return
        if not tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        size_bytes = storage.nbytes()
        if key in self._storages or size_bytes == 0 or tensor in self.host:
            return
        ref = StorageRef(storage, self._on_storage_freed)
        ref.key = key
        ref.block = self._alloc(size_bytes, category, op, module)
        self._storages[key] = ref
        if self._provenance is not None:
            self._provenance.on_tensor(ref.block.number, tensor)

    def has_recorded(self, tensor: Tensor) -> bool:
        """Return whether a meta tensor's storage is recorded or empty; wrappers count as recorded."""
        if is_wrapped(tensor):
            return True
        storage = innermost(tensor).untyped_storage()
        return storage.nbytes() == 0 or storage._cdata in self._storages

    def record_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operator that ran earlier, whose arguments and results are meta tensors.

        Views, resizes, and in-place operators without a workspace rule are not recorded.
        """
        op = self._operators.get(id(func)) or inspect_operator(func, self.target.torch)
        if op.outputs is OutputKind.NEW or (op.outputs is not OutputKind.VIEWS and op.rule is not None):
            self._operators[id(func)] = op
            self._record_run(op, args, kwargs, out)

    def record_empty_cache(self) -> None:
        """Record `torch.cuda.empty_cache()` as part of the last free, or of a dummy block's free.

        The dummy block has one byte, and is allocated only if the last record is not a free that can empty
        the cache.
        """
        if not self._log.empty_cache(since=self._calls[-1].end if self._calls else 0):
            self._log.free(self._alloc(1, Category.TEMPORARY, "empty_cache"), empties_cache=True)

    @contextmanager
    def graph_pool(self, pool: int = GRAPH_POOL) -> Iterator[None]:
        """Record allocations in a private pool of CUDA graphs, by default the compiler's, in the context."""
        before, self._pool = self._pool, pool
        try:
            yield
        finally:
            self._pool = before

    def clear_cublas_workspaces(self) -> None:
        """Record that cuBLAS frees its workspaces. `torch._C._cuda_clearCublasWorkspaces` frees them."""
        self._cublas.forget()
        for block in self._cublas_blocks:
            self._log.free(block)
        self._cublas_blocks.clear()

    def free_storage(self, storage: Any) -> None:
        """Record that a storage's block is freed while the storage lives on."""
        ref = self._storages.pop(storage._cdata, None)
        if ref is not None:
            self._log.free(ref.block)

    def set_category(self, tensor: Tensor, category: Category) -> None:
        """Set the category of a tensor's block, if the tensor was recorded."""
        for one in parts(tensor):
            storage = self._storages.get(one.untyped_storage()._cdata)
            if storage is not None:
                storage.block.category = category

    def set_module(self, tensor: Tensor, module: str) -> None:
        """Set the module of a tensor's block, if the tensor was recorded."""
        for one in parts(tensor):
            storage = self._storages.get(one.untyped_storage()._cdata)
            if storage is not None:
                self._log.set_module(storage.block, module)

    def record_resize(self, tensor: Tensor) -> None:
        """Record a resize of a tensor's storage: if its size changed, a free of its block and a new block."""
        storage = tensor.untyped_storage()
        ref = self._storages.get(storage._cdata)
        if ref is None:
            self.record_tensor(tensor, Category.TEMPORARY, "resize_")
        elif ref.block.size_bytes != storage.nbytes():
            self._on_storage_freed(ref)
            self.record_tensor(tensor, Category.TEMPORARY, "resize_")

    def place(self) -> str:
        """Return a description of the running module, or of the phase if no module runs.

        A phase is named as the loss, the backward pass, or by its name.
        """
        return self.modules.place_in(self.phase)

    def operators(self) -> list[str]:
        """Return the names of the operators that ran, each once, in the order of their first runs."""
        return [op.name for op in self._operators.values()]

    def living_blocks(self) -> set[int]:
        """Return the numbers of the blocks whose storages are alive."""
        return {storage.block.number for storage in self._storages.values()}

    def allocated_bytes(self) -> tuple[int, int]:
        """Return the allocated bytes now and at the peak, rounded as by the caching allocator."""
        return self._log.allocated_bytes()

    def finish(self, batch: int, notes: tuple[str, ...] = ()) -> Trace:
        """Return the trace up to the start of the phase `END`."""
        events, collector = self._log.events(), self._provenance
        blocks = [event.block for event in events if isinstance(event, Alloc)]
        provenance = () if collector is None else collector.provenance_of(blocks)
        rows = self._conv_workspaces
        conv_workspaces = tuple(rows[block] for block in blocks if block in rows)
        unknown = tuple(sorted(self.unknown_ops))
        notes = (*notes, *self._notes)
        trace = Trace(events, self._log.sites(), batch, unknown, notes, provenance, conv_workspaces)
        return replace(trace, pinned=self.host.most_pinned, facts=frozenset(self.facts))

    # ---- called by torch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(map(calls_operators_itself, types)):
            return NotImplemented
        if torch.is_inference_mode_enabled() or is_composite(func):
            with as_without_gradients(), self:
                return func(*args, **(kwargs or {}))
        if self._provenance is not None:
            self._provenance.on_operator()
        op = self._operators.get(id(func)) or self._inspect(func)
        if op.parts is not None:
            with self:
                return op.parts(*args, **(kwargs or {}))
        outputs = op.outputs
        if outputs is OutputKind.VIEWS:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is aten.index_put.default and _is_gradient_of_index():
            return self.__torch_dispatch__(aten._index_put_impl_.default, types, (*args[:3], True, True))
        self.running = op.name
        phase = self.phase
        try:
            out = self._run(func, args, kwargs or {}, phase)
        except RuntimeError:
            likes = self.host.likes_of(func, args, kwargs or {}, self._copy_to_meta)
            if likes is None:
                raise
            args, kwargs = likes
            out = self._run(func, args, kwargs, phase)
        if (self.host or self.host.destination) and self._is_outside(op, args, kwargs, out):
            return out
        self._record_run(op, args, kwargs, out)
        if op.is_collective:
            self._pending.note(func, args, out)
        if func is aten.add.Tensor and phase is Phase.BACKWARD and not torch.is_grad_enabled():
            self._expect_inplace_accumulation(args, out)
        self.running = None
        return out

    def _copy_to_meta(self, tensor: Tensor) -> Tensor:
        """Return a meta copy of a CPU tensor, with the tensor's values if the capture keeps values."""
        copy: Tensor = self._run(aten._to_copy.default, (tensor,), {"device": _META}, self.phase)
        return copy

    def _record_run(
        self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any
    ) -> None:
        if op.is_unknown and _is_on_meta(args, out):
            self.unknown_ops.add(op.name)
        if op.rule is not None or op.uses_blas or op.outputs is OutputKind.RESIZED:
            if not _is_on_meta(args, out):
                return
            given = args if op.rule is None else self.host.marked(positional_args(op.func, args, kwargs))
            self._record_kernel(op, given, out)
        elif op.outputs is OutputKind.NEW:
            self._record_outputs(op, out)

    def _is_outside(
        self, op: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any
    ) -> bool:
        """Record an operator on the CPU, a move between devices or any `copy_`; return False for others.

        Others are not recorded. A `copy_` between tensors of the GPU allocates nothing.
        """
        side = self.host.side_of(op.func, args, kwargs)
        if side is Side.HOST:
            self.host.add_results(out)
        elif self.host.destination is Side.GPU:
            is_input = self.phase is not Phase.BACKWARD  # where activations come back from the CPU
            for tensor in op.new_tensors(out):
                self.record_tensor(tensor, Category.INPUT if is_input else Category.TEMPORARY, op.name)
        elif op.func is not aten.copy_.default:
            return False
        held = self._record_ops(op, staging_copies(op.func, args, kwargs or {}, out, self.host), [], 0)
        self._free(reversed(held))
        self.running = None
        return True

    def _inspect(self, func: Any) -> Operator:
        op = self._operators[id(func)] = inspect_operator(func, self.target.torch)
        return op

    def _record_kernel(self, op: Operator, args: tuple[Any, ...], out: Any) -> None:
        """Record an operator's outputs, its kernel's workspaces, and workspaces that cuBLAS keeps."""
        if op.outputs is OutputKind.RESIZED:
            for tensor in op.new_tensors(out):
                self._record_resized(op, tensor)
        start = len(self._log.records)
        new: list[Tensor] = []
        ops: Ops = ()
        if op.rule is not None:
            answered = answer_convolutions(op.rule(args, out, self.target), self.target)
            ops = self._autotune_once(op, args, answered)
            if note := note_on_call(op.func, args, out, self.target):
                self._notes[note] = None
        has_product = uses_cublas(op.func, args, ops, self.target.torch)
        cublas_bytes = self._cublas.first_use(self.phase, self._blas_stream) if has_product else 0
        if op.outputs is OutputKind.NEW:
            new = self._without_known(op.new_tensors(out))
        held = self._record_ops(op, ops, new, cublas_bytes)
        self._free(reversed(held))
        if self._calls is not None and (op.rule is not None or op.uses_blas):
            site = Site(self.modules.name_in(self.phase), op.name)
            takes = tuple(t.is_meta and t.untyped_storage().nbytes() > 0 for t in new)
            end = len(self._log.records)
            passed = to_meta(args), to_meta(out)
            call = RecordedCall(start, end, site, op.func, *passed, takes, self._stream)
            self._calls.append(call)
        lt_bytes = (
            self._cublas.first_lt_use(op.func, args, self.phase, self._blas_stream) if op.uses_blas else 0
        )
        self._record_cublas(op, lt_bytes)  # not of the kernel's rule, which is the same at each call

    def _record_resized(self, op: Operator, out: Tensor) -> None:
        """Record the new block of a storage whose size changed, then the free of the old block.

        The old block lives until its contents are copied (native/cuda/Resize.cpp).
        """
        storage = out.untyped_storage()
        ref = self._storages.get(storage._cdata)
        if ref is None:
            self.record_tensor(out, Category.TEMPORARY, op.name)
        elif ref.block.size_bytes != storage.nbytes():
            old = ref.block
            ref.block = self._alloc(storage.nbytes(), old.category, op.name)
            self._log.free(old)

    def _autotune_once(self, op: Operator, args: tuple[Any, ...], ops: Ops) -> Ops:
        """Return the ops of a rule, without autotuning if a call with the same signature ran before."""
        timed = [one for one in ops if isinstance(one, KernelOp) and one.kind is OpKind.AUTOTUNE]
        if not timed:
            return ops
        signature = repr((op.name, to_meta(args)))
        if signature in self._autotuned:
            return tuple(one for one in ops if one not in timed)
        self._autotuned.add(signature)
        return ops

    def _record_ops(self, op: Operator, ops: Ops, new: list[Tensor], cublas_bytes: int) -> list[Block | None]:
        """Record the ops of a rule and the new outputs; return the blocks to free when the kernel returns.

        cuBLAS's workspace is recorded too if `cublas_bytes` is not 0.
        """
        category = self._output_category()
        held: list[Block | None] = []
        coming = list(new)
        steps = [one if isinstance(one, KernelOp) else KernelOp(OpKind.TRANSIENT, one) for one in ops]
        if not any(one.kind in (OpKind.OUTPUT, OpKind.OUTPUTS) for one in steps):
            steps.insert(0, Outputs())
        for one in (*steps, Outputs()):
            match one.kind:
                case OpKind.OUTPUT:
                    if coming:
                        self.record_tensor(coming.pop(min(one.number, len(coming) - 1)), category, op.name)
                case OpKind.OUTPUTS:
                    while coming:
                        self.record_tensor(coming.pop(0), category, op.name)
                case OpKind.RELEASE:
                    self._free([held.pop() for _ in range(one.number)])
                case OpKind.RELEASE_BENEATH:
                    self._free([held.pop(-1 - one.number)])
                case OpKind.CUBLAS:
                    self._record_cublas(op, cublas_bytes)
                    cublas_bytes = 0
                case OpKind.HOLD if not one.number:
                    held.append(None)  # counted when blocks are released
                case _ if one.number:
                    block = self._alloc(one.number, Category.WORKSPACE, op.name)
                    if one.kind is OpKind.KEEP:
                        continue
                    if one.kind is OpKind.HOLD:
                        held.append(block)
                        continue
                    block.may_fail = one.kind in (OpKind.TRY, OpKind.AUTOTUNE)
                    if one.explain is not None:
                        self._conv_workspaces[block.number] = one.explain(block.number)
                    self._log.free(block, empties_cache=one.kind is OpKind.AUTOTUNE)
        self._record_cublas(op, cublas_bytes)
        return held

    def _free(self, blocks: Iterable[Block | None]) -> None:
        for block in blocks:
            if block is not None:
                self._log.free(block)

    def _record_cublas(self, op: Operator, size_bytes: int) -> None:
        if size_bytes:
            self._cublas_blocks.append(self._alloc(size_bytes, Category.WORKSPACE, op.name))

    def _record_outputs(self, op: Operator, out: Any) -> None:
        category = self._output_category()
        for tensor in op.new_tensors(out):
            self.record_tensor(tensor, category, op.name)

    def _output_category(self) -> Category:
        return Category.INPUT if self.phase is Phase.INPUTS else Category.TEMPORARY

    def _without_known(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return one tensor for each storage that has no recorded block yet."""
        new: dict[int, Tensor] = {}
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self._storages:
                new.setdefault(key, tensor)
        return list(new.values())

    def _on_storage_freed(self, storage: Any) -> None:
        del self._storages[storage.key]
        self._log.free(storage.block)

    @property
    def _stream(self) -> int:
        return self._streams.current if self._pool is None else self._pool

    @property
    def _blas_stream(self) -> int:
        """Return the stream for which cuBLAS keeps a workspace. In the compiler's pool it is GRAPH_POOL."""
        return self._pool if self._pool == GRAPH_POOL else self._streams.current

    def _alloc(self, size_bytes: int, category: Category, op: str, module: str | None = None) -> Block:
        where = self.modules.name_in(self.phase) if module is None else module
        block = self._log.alloc(size_bytes, category, op, where, self._stream)
        if self.phase is Phase.BACKWARD and (node := torch._C._current_autograd_node()) is not None:
            block.node = node._sequence_nr()
        return block

    def _expect_inplace_accumulation(self, args: tuple[Any, ...], out: Tensor) -> None:
        """Note an addition of gradients that may be in place on a GPU.

        The sum may reuse the block of its first operand. autograd/input_buffer.cpp accumulates in place if it
        holds the last reference to a dense tensor, but never under a dispatch mode or on the meta device
        (ATen/TensorSubclassLikeUtils.h). It held the last reference exactly if the operand's storage is freed
        before anything else happens. It never accumulates in a view, since the view holds its base; but it
        does in the last of several tensors that a kernel made in one storage, such as cuDNN's gradients of a
        recurrent layer's weights. A node may also add tensors of its own, which is never in place.
        """
        operand = args[0]
        if not isinstance(operand, Tensor) or operand.dtype != out.dtype or operand.shape != out.shape:
            return
        if operand._is_view() or not is_dense(operand.shape, operand.stride()):
            return
        old = self._storages.get(operand.untyped_storage()._cdata)
        new = self._storages.get(out.untyped_storage()._cdata)
        if old is not None and new is not None and not _is_in_formula(old.block):
            self._log.expect_inplace_accumulation(old.block, new)


def _is_in_formula(block: Block) -> bool:
    """Return whether the running autograd node itself adds to a block's tensor, not autograd's accumulation.

    Autograd adds what the node returns to a tensor of an earlier node, unless the node returns two gradients
    of one tensor. `var_mean` is a node that adds two tensors of its own (autograd/FunctionsManual.cpp).
    """
    node = torch._C._current_autograd_node()
    if node is None or node._sequence_nr() != block.node:
        return False
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) == len(edges)


def _is_on_meta(args: Any, out: Any) -> bool:
    """Return whether an operator reads or makes a meta tensor. If not, the CPU runs it."""
    return any(isinstance(one, Tensor) and one.is_meta for one in leaves_of((args, out)))


def _is_gradient_of_index() -> bool:
    """Return whether autograd computes the gradient of `x[index]` now.

    On a GPU, autograd adds the gradient to new zeros in place, but under a dispatch mode it makes a new
    tensor (index_backward, autograd/FunctionsManual.cpp).
    """
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "IndexBackward0" and not torch.is_grad_enabled()
