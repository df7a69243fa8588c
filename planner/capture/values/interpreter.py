"""Interpret operators with values on the CPU, for models whose control flow depends on values.

A capture by shapes alone stops when a model reads a value: for example a detector that keeps the boxes above
a threshold, or a mixture that sends each token to an expert. Here tensors are on the meta device too, so that
operators, autograd and recording work as in any capture, but each storage has a deferred value. The value is
computed on the CPU when the model reads it, and only then. Results of products, convolutions and attention
are random, as with random weights. So no weights are needed, and a batch costs little more than by shapes
alone. The generator starts from the same seed each time.
"""

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from planner.capture.arguments import leaves_of, map_leaves
from planner.capture.cuda.callers import is_of_torch, line_of_caller
from planner.capture.meta_kernels.run import MetaRunner
from planner.capture.values.lazy_values import (
    RANDOMIZED_OPS,
    DeferredOp,
    StorageValue,
    TensorView,
    compute,
    inspect_pending,
    materialize,
    written_arguments,
)
from planner.capture.values.reads import (
    GUESS,
    GUESSED_BYTES,
    Key,
    LargeReadError,
    ManyReadsError,
    ReadPolicy,
    ReadResult,
    is_count,
    result_of,
    scaled_count,
    scaled_result,
)
from planner.errors import ModelError
from planner.program import Capability, Phase

aten = torch.ops.aten

_CPU = torch.device("cpu")
MOST_LINES = 3  # largest number of lines that a note names


class DataDependentError(ModelError):
    """Raised if a capture by shapes alone reaches code that reads values of tensors."""

    def __init__(self, model: str, place: str) -> None:
        super().__init__(
            f"{model}: {place}, which reads values of tensors that a plan cannot know; "
            "take that call out of the traced path"
        )
        self.place = place

    def notes(self, values: "ValueInterpreter") -> tuple[str, ...]:
        """Return the notes of `values`, and a note on whether the read values were random or computed.

        `values` is the interpreter of the second capture, which read them.
        """
        if values.has_random_shapes:
            how = (
                "shapes that depend on them come from values drawn at random on the CPU, not from data and "
                "trained weights"
            )
        elif values.has_random_reads:
            how = (
                "conditions on them are decided by random numbers on the CPU, not by data and trained weights"
            )
        else:
            how = "they were computed on the CPU"
        return (*values.notes(), f"{self.place}, which reads values: {how}")


class ValueInterpreter:
    """An interpreter that runs operators on meta tensors and computes the values that are read."""

    def __init__(
        self,
        capability: Capability,
        known: Sequence[tuple[Tensor, Tensor]] = (),
        policy: ReadPolicy | None = None,
    ) -> None:
        """Set the compute capability, the initial values of tensors and the limits of reads.

        `known` are pairs of a tensor with values and its meta counterpart.
        """
        self.has_random_reads = False
        self.has_random_shapes = False  # whether random values decided the shape of a result
        self._policy = ReadPolicy() if policy is None else policy
        self._run_meta = MetaRunner(capability).run
        self._lines: dict[str, None] = {}  # source lines that read values
        self._reused_results = self._guessed = False
        self._values: dict[int, StorageValue] = {}  # by identity of the storage
        self._storages: dict[int, weakref.ref[Any]] = {}
        for real, like in known:
            storage = real.detach().clone(memory_format=torch.contiguous_format).untyped_storage()
            self._set_value(like, StorageValue(storage.nbytes(), real.dtype, None, storage))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase) -> Any:
        """Run an operator on the meta device, defer the values of its result, and return the result.

        An operator that needs values runs on the CPU instead. An operator needs values if it fails on the
        meta device. Values of gradients and of the optimizer's steps are not followed, so parameters keep
        their values.
        """
        if not any(map(_is_on_meta, leaves_of(args, kwargs))):
            return func(*args, **kwargs)
        if func is aten.copy_.default and not args[0].is_meta:  # into a CPU tensor
            read = self.run(aten._to_copy.default, (args[1],), {"device": _CPU}, phase)
            return func(args[0], read, *args[2:], **kwargs)
        views, named = map_leaves(self._view, (args, kwargs))
        op = DeferredOp(func, views, named, _is_randomized(func))
        try:
            out = self._run_meta(func, args, kwargs, phase)
        except Exception as error:
            if func is not aten.index.Tensor:
                return self._run_on_cpu(op, args, kwargs, error)
            out = self._run_meta(func, (args[0], self._without_masks(args[1])), {}, phase)
        in_backward = phase is Phase.BACKWARD and not torch.is_grad_enabled()
        # After `set_` a tensor shares the storage, and the value, of another tensor.
        is_empty = func._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::set_"))
        if not (in_backward or is_empty or phase is Phase.OPTIMIZER):
            self._defer(op, args, kwargs, out)
        return out

    def notes(self) -> tuple[str, ...]:
        """Return notes on reused and guessed values, and on the lines that read values.

        Lines are noted if there are several.
        """
        notes = []
        if self._reused_results and self._policy.results is not None:
            log = self._policy.results
            of_tensors = "that are read" if self._policy.reuses_all else "of large tensors"
            notes.append(f"values {of_tensors} are those at batch {log.batch}, counts in proportion")
        if self._guessed:
            notes.append(f"floating-point numbers of large tensors that are read are taken as {GUESS:.4f}")
        if len(self._lines) > 1:
            lines = [*self._lines]
            more = f" and {len(lines) - MOST_LINES} others" if len(lines) > MOST_LINES else ""
            notes.append(f"values are read at {', '.join(lines[:MOST_LINES])}{more}")
        return tuple(notes)

    # ---- deferred values

    def _set_value(self, tensor: Tensor, value: StorageValue) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._values[key] = value
        if key not in self._storages:

            def forget(_: Any) -> None:
                del self._values[key], self._storages[key]

            self._storages[key] = weakref.ref(storage, forget)

    def _view(self, leaf: Any) -> Any:
        """Convert a meta tensor to a `TensorView`, and the meta device to the CPU.

        Another leaf is returned unchanged.
        """
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return _CPU
        if not (isinstance(leaf, Tensor) and leaf.is_meta):
            return leaf
        storage = leaf.untyped_storage()
        value = self._values.get(storage._cdata)
        if value is None:
            value = StorageValue(storage.nbytes(), leaf.dtype)
            self._set_value(leaf, value)
        return TensorView(value, leaf.dtype, leaf.shape, leaf.stride(), int(leaf.storage_offset()))

    def _defer(self, op: DeferredOp, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Defer the values of the storages that an operator writes or makes."""
        for tensor in filter(_is_on_meta, written_arguments(op.func, args, kwargs)):
            old = self._values[tensor.untyped_storage()._cdata]
            if all(old is not other for other, _ in op.written):
                new = StorageValue(old.size_bytes, old.dtype, op)
                op.written.append((old, weakref.ref(new)))
                self._set_value(tensor, new)
        for index, tensor in enumerate(leaves_of(out)):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._values:
                    made = StorageValue(storage.nbytes(), tensor.dtype, op)
                    self._set_value(tensor, made)
                    op.made.append((index, self._view(tensor).layout(), weakref.ref(made)))

    # ---- reads

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the indices with each mask replaced by meta tensors, one for each dimension of the mask.

        Each meta tensor has as many elements as the mask has true elements, whose number is read.
        """
        replaced: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                replaced.append(index)
                continue
            count = self._count_true(index)
            replaced += [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(index.dim())]
        return replaced

    def _count_true(self, mask: Tensor) -> int:
        view = self._view(mask)
        key = (str(aten.index.Tensor), line_of_caller(is_of_torch))
        result = self._known_result(key, aten.index.Tensor, [view.value])
        if result is not None:
            self.has_random_shapes = True
            return scaled_count(result, mask.numel())
        self.has_random_reads |= materialize(view.value)
        count = int(view.on(view.value.storage).count_nonzero())
        self.has_random_shapes |= view.value.is_random
        self._policy.log.append(key, ReadResult(mask.numel(), count))
        return count

    def _known_result(self, key: Key, func: Any, inputs: list[StorageValue]) -> ReadResult | None:
        """Return the result of the same read in another run, or None if the values must be computed.

        Raises ManyReadsError if the run's reads compute too many values, and LargeReadError if a value is too
        large to compute and no other run's results are given.
        """
        self._lines.setdefault(key[1])
        most_bytes = self._policy.most_bytes(func)
        pending = inspect_pending(inputs, most_bytes)
        if not pending.is_random:
            return None
        if pending.largest_bytes <= most_bytes:
            self._policy.log.computed_bytes += pending.total_bytes
            if self._policy.log.computed_bytes > self._policy.most_bytes_of_run:
                raise ManyReadsError
            return None
        if self._policy.results is None:
            raise LargeReadError(pending.largest_bytes)
        result = self._policy.results.next_result(key)
        if result is not None:
            self.has_random_reads = self._reused_results = True
        return result

    def _run_on_cpu(
        self, op: DeferredOp, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> Any:
        """Return the result of an operator that fails on the meta device: computed, guessed or reused.

        A reused result is from another run. Raises `error`, the operator's error on the meta device, if the
        operator fails on the CPU too or returns a sparse tensor.
        """
        func, inputs, results = op.func, op.inputs, self._policy.results
        if self._policy.guesses_numbers and self._is_large_number(func, args, inputs):
            return GUESS
        key = (str(func), line_of_caller(is_of_torch))
        leaves = leaves_of(args, kwargs)
        stays = any(isinstance(leaf, torch.device) and leaf.type == "cpu" for leaf in leaves)
        cached = self._known_result(key, func, inputs) if stays or func is not aten._to_copy.default else None
        if cached is not None and results is not None:
            out = self._scaled(func, cached, args[0], kwargs)
            if is_count(out, _source(inputs)):
                return out * results.new_batch // results.batch
            if out is not NotImplemented:
                return out
        for value in inputs:
            self.has_random_reads |= materialize(value)
        try:
            out, copies = compute(op)
        except Exception:
            raise error from None
        if any(isinstance(one, Tensor) and one.layout is not torch.strided for one in leaves_of(out)):
            raise error  # sparse tensors, which are not planned
        is_random = any(value.is_random for value in inputs)
        self.has_random_shapes |= is_random and not stays and isinstance(out, Tensor | tuple)
        if inputs:
            self._policy.log.append(key, result_of(func, args[0].numel(), out))
        if func is aten.nonzero.default:
            out = out.t().contiguous().t()  # in column-major order (native/cuda/Nonzero.cu)
        written = written_arguments(func, args, kwargs)
        for tensor in written:
            if tensor.is_meta:
                old = self._values[tensor.untyped_storage()._cdata]
                storage = copies[id(old)]
                self._set_value(tensor, StorageValue(storage.nbytes(), old.dtype, None, storage, is_random))
        if written:
            return written[0]
        return out if stays else map_leaves(lambda real: self._like(real, is_random), out)

    def _is_large_number(self, func: Any, args: tuple[Any, ...], inputs: list[StorageValue]) -> bool:
        """Return whether a call reads a float that depends on large random tensors; if so, note its line."""
        if func is not aten._local_scalar_dense.default or not args[0].dtype.is_floating_point:
            return False
        pending = inspect_pending(inputs)
        if not pending.is_random or pending.largest_bytes <= GUESSED_BYTES:
            return False
        self._lines.setdefault(line_of_caller(is_of_torch))
        self.has_random_reads = self._guessed = True
        return True

    def _scaled(self, func: Any, result: ReadResult, read: Tensor, options: dict[str, Any]) -> Any:
        out = scaled_result(func, result, read)
        if out is None:  # an unknown copy on the CPU takes no memory there
            return torch.zeros((), dtype=options.get("dtype") or read.dtype).expand(read.shape)
        self.has_random_shapes |= func is not aten._to_copy.default and isinstance(out, Tensor | tuple)
        return out

    def _like(self, real: Any, is_random: bool) -> Any:
        """Return the meta counterpart of a real tensor, with its value.

        Other objects are returned unchanged.
        """
        if not isinstance(real, Tensor):
            return real
        real = real.clone()  # a dense copy, which keeps the strides of a dense tensor
        like = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        if real.numel():
            storage = real.untyped_storage()
            self._set_value(like, StorageValue(storage.nbytes(), real.dtype, None, storage, is_random))
        return like


def _source(inputs: list[StorageValue]) -> str:
    """Return the name of the deferred operator that makes a read's only input, or "" if there is none."""
    op = inputs[0].made_by if len(inputs) == 1 else None
    return "" if op is None else str(op.func._schema.name)


@cache
def _is_randomized(func: Any) -> bool:
    return any(part in func._schema.name for part in RANDOMIZED_OPS)


def _is_on_meta(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.is_meta
    return isinstance(leaf, torch.device) and leaf.type == "meta"
