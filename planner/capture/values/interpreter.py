"""The second tracer: values on the CPU for models whose course depends on values.

The first tracer has shapes only and stops where a model reads a value: a detector that keeps as many boxes as
pass a threshold, a mixture that sends each token to an expert. Here tensors stay on meta as well, so that
operators, autograd and the record are those of any other trace, but beside each storage stands how its values
come about. They are computed on the CPU when the model asks for some, and only those. What products,
convolutions and attention give is drawn at random instead, as random weights would give it; so no weights are
needed, and a batch costs little more than its shapes do. The generator starts from the same seed each time.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from planner.capture.meta_kernels.reductions import run_on_meta
from planner.capture.values.lazy_values import (
    DRAWN,
    Contents,
    Recipe,
    Ref,
    compute,
    draw,
    fill,
    layout_of,
    written_to,
)
from planner.capture.values.reads import (
    Answer,
    Key,
    LargeReadError,
    Reads,
    answered,
    is_count,
    line_that_reads,
    noted_answer,
    scaled_count,
)
from planner.errors import ModelError
from planner.program import FROM_CHANCE, RANDOM_COURSE, Phase

aten = torch.ops.aten

_CPU = torch.device("cpu")
ENDLESS = float("inf")
MOST_LINES = 3  # that are named


class ValuesNeededError(ModelError):
    """A trace with shapes alone came to a place that needs values."""

    def __init__(self, model: str, place: str) -> None:
        super().__init__(
            f"{model}: {place}, which reads values of tensors that a plan cannot know; "
            "take that call out of the traced path"
        )
        self.place = place

    def notes(self, values: "Values") -> tuple[str, ...]:
        """What the answer must say once the values were there."""
        if values.drew_shapes:
            how = (
                f"shapes that depend on them come from {FROM_CHANCE} on the CPU, not from data and trained "
                "weights"
            )
        elif values.drew:
            how = f"conditions on them are decided by {RANDOM_COURSE}, not by data and trained weights"
        else:
            how = "they were computed on the CPU"
        return (*values.notes(), f"{self.place}, which reads values: {how}")


class Values:
    """Runs operators of one trace on meta and remembers how their values come about."""

    def __init__(
        self,
        known: Sequence[tuple[Tensor, Tensor]] = (),
        most_bytes: Callable[[Any], float] = lambda func: ENDLESS,
        answers: Reads | None = None,
        noted: Reads | None = None,
    ) -> None:
        """`known` are pairs of a tensor with values and its like on meta.

        `most_bytes` of a tensor of chance are computed for an operator that reads; beyond, `answers` has what
        it gives, or LargeReadError is raised. What is computed goes into `noted`.
        """
        self.drew = False  # whether anything that was read comes from chance
        self.drew_shapes = False  # whether that decided the shape of a result
        self._most_bytes, self._answers, self._noted_reads = most_bytes, answers, noted
        self._lines: dict[str, None] = {}  # that read
        self._was_answered = False
        self._of: dict[int, Contents] = {}  # by identity of the storage
        self._watched: dict[int, weakref.ref[Any]] = {}
        for real, like in known:
            storage = real.detach().clone(memory_format=torch.contiguous_format).untyped_storage()
            self._hold(like, Contents(storage.nbytes(), real.dtype, None, storage))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase) -> Any:
        """As `run_on_meta`; an operator that fails there for want of values runs on the CPU at once.

        Values of gradients and of the optimizer's work are not followed: parameters keep theirs.
        """
        leaves, spec = tree_flatten((args, kwargs))
        if not any(_is_on_meta(leaf) for leaf in leaves):
            return func(*args, **kwargs)
        noted = [self._noted(leaf) for leaf in leaves]
        drawn = any(name in func._schema.name for name in DRAWN)
        recipe = Recipe(func, noted, spec, drawn)
        try:
            out = run_on_meta(func, args, kwargs, phase)
        except Exception as error:
            if func is not aten.index.Tensor:
                return self._run_at_once(recipe, args, kwargs, error)
            out = run_on_meta(func, (args[0], self._without_masks(args[1])), {}, phase)
        in_backward = phase is Phase.BACKWARD and not torch.is_grad_enabled()
        # After `set_` a tensor has the storage of another, whose contents stand there.
        is_empty = func._schema.name.startswith(("aten::empty", "aten::new_empty", "aten::set_"))
        if not (in_backward or is_empty or phase is Phase.OPTIMIZER):
            self._remember(recipe, args, kwargs, out)
        return out

    def notes(self) -> tuple[str, ...]:
        """Sentences on the reads beside the first."""
        found = []
        if self._was_answered and self._answers is not None:
            found.append(
                f"values of large tensors are taken as at batch {self._answers.batch}, counts in proportion"
            )
        if len(self._lines) > 1:
            lines = [*self._lines]
            more = f" and {len(lines) - MOST_LINES} others" if len(lines) > MOST_LINES else ""
            found.append(f"values are read at {', '.join(lines[:MOST_LINES])}{more}")
        return tuple(found)

    # ---- what is remembered

    def _hold(self, tensor: Tensor, contents: Contents) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._of[key] = contents
        if key not in self._watched:

            def died(_: Any) -> None:
                del self._of[key], self._watched[key]

            self._watched[key] = weakref.ref(storage, died)

    def _noted(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return _CPU
        if not (isinstance(leaf, Tensor) and leaf.is_meta):
            return leaf
        storage = leaf.untyped_storage()
        contents = self._of.get(storage._cdata)
        if contents is None:
            contents = Contents(storage.nbytes(), leaf.dtype)
            self._hold(leaf, contents)
        return Ref(contents, leaf.dtype, leaf.shape, leaf.stride(), int(leaf.storage_offset()))

    def _remember(self, recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Give what the operator wrote and made contents that stand for running it."""
        for tensor in written_to(recipe.func, args, kwargs):
            before = self._of[tensor.untyped_storage()._cdata]
            if all(before is not other for other, _ in recipe.written):
                after = Contents(before.size_bytes, before.dtype, recipe)
                recipe.written.append((before, weakref.ref(after)))
                self._hold(tensor, after)
        for index, tensor in enumerate(tree_flatten(out)[0]):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._of:
                    made = Contents(storage.nbytes(), tensor.dtype, recipe)
                    self._hold(tensor, made)
                    layout = self._noted(tensor)
                    recipe.made.append((index, layout_of(layout), weakref.ref(made)))

    # ---- what is computed

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Masks as the indices of what they let through: how many these are decides the shape of a result,
        whatever is indexed.
        """
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            count = self._count(index)
            found += [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(index.dim())]
        return found

    def _count(self, mask: Tensor) -> int:
        """How many elements of the mask are true."""
        ref = self._noted(mask)
        key = (str(aten.index.Tensor), line_that_reads())
        answer = self._answer_to(key, aten.index.Tensor, [ref.contents])
        if answer is not None:
            self.drew_shapes = True
            return scaled_count(answer, mask.numel())
        self._settle(ref.contents)
        count = int(ref.on(ref.contents.storage).count_nonzero())
        self.drew_shapes |= ref.contents.by_chance
        if self._noted_reads is not None:
            self._noted_reads.note(key, Answer(mask.numel(), count))
        return count

    def _answer_to(self, key: Key, func: Any, needed: list[Contents]) -> Answer | None:
        """What the read gave in another run; None where it is to be computed. Raises LargeReadError."""
        self._lines.setdefault(key[1])
        size_bytes, is_of_chance = _largest(needed)
        if not is_of_chance or size_bytes <= self._most_bytes(func):
            return None
        if self._answers is None:
            raise LargeReadError(size_bytes)
        found = self._answers.following(key)
        if found is not None:
            self.drew = self._was_answered = True
        return found

    def _run_at_once(
        self, recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> Any:
        """The result of an operator that meta has no answer for. Raises `error` where the CPU has none."""
        func, needed = recipe.func, recipe.needed
        key = (str(func), line_that_reads())
        stays = any(isinstance(leaf, torch.device) and leaf.type == "cpu" for leaf in _leaves(args, kwargs))
        answer = self._answer_to(key, func, needed) if stays or func is not aten._to_copy.default else None
        if answer is not None and self._answers is not None:
            out = self._answered(func, answer, args[0], kwargs)
            if is_count(out, _source(needed)):
                return out * self._answers.wanted // self._answers.batch
            if out is not NotImplemented:
                return out
        for contents in needed:
            self._settle(contents)
        try:
            out, copies = compute(recipe)
        except Exception:
            raise error from None
        is_of_chance = any(contents.by_chance for contents in needed)
        self.drew_shapes |= is_of_chance and not stays and isinstance(out, Tensor | tuple)
        if self._noted_reads is not None and needed:
            self._noted_reads.note(key, noted_answer(func, args[0].numel(), out))
        if func is aten.nonzero.default:
            out = out.t().contiguous().t()  # a column after the other (native/cuda/Nonzero.cu)
        written = written_to(func, args, kwargs)
        for tensor in written:
            if not tensor.is_meta:
                continue
            before = self._of[tensor.untyped_storage()._cdata]
            storage = copies[id(before)]
            self._hold(tensor, Contents(storage.nbytes(), before.dtype, None, storage, is_of_chance))
        if written:
            return written[0]
        return out if stays else tree_map(lambda real: self._like(real, is_of_chance), out)

    def _answered(self, func: Any, answer: Answer, read: Tensor, options: dict[str, Any]) -> Any:
        out = answered(func, answer, read, tuple(read.shape))
        if out is None:  # a copy on the CPU that nobody knows takes no memory there
            kind = options.get("dtype") or read.dtype
            return torch.zeros((), dtype=kind).expand(read.shape)
        self.drew_shapes |= func is not aten._to_copy.default and isinstance(out, Tensor | tuple)
        return out

    def _like(self, real: Any, by_chance: bool) -> Any:
        if not isinstance(real, Tensor):
            return real
        real = real.clone()  # without gaps, and laid out as it is where it had none
        like = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        if real.numel():
            storage = real.untyped_storage()
            self._hold(like, Contents(storage.nbytes(), real.dtype, None, storage, by_chance))
        return like

    def _settle(self, wanted: Contents) -> None:
        """Compute these values and all that they come from; deep chains need no recursion."""
        waiting = [wanted]
        while waiting:
            contents = waiting[-1]
            if contents.storage is not None:
                waiting.pop()
                continue
            recipe = contents.recipe
            missing = [] if recipe is None else [one for one in recipe.needed if one.storage is None]
            if missing:
                waiting.extend(missing)
                continue
            if recipe is not None:
                fill(recipe)
            if contents.storage is None:
                contents.storage = draw(contents)
                self.drew = True
            contents.recipe = None


def _largest(wanted: list[Contents]) -> tuple[int, bool]:
    """Bytes of the largest contents that have to be computed for these, and whether any come from chance."""
    waiting, seen = [*wanted], {id(contents) for contents in wanted}
    largest, is_of_chance = 0, False
    while waiting:
        contents = waiting.pop()
        if contents.storage is not None:
            is_of_chance |= contents.by_chance
            continue
        largest = max(largest, contents.size_bytes)
        recipe = contents.recipe
        if recipe is None or recipe.drawn:
            is_of_chance = True
            continue
        for needed in recipe.needed:
            if id(needed) not in seen:
                seen.add(id(needed))
                waiting.append(needed)
    return largest, is_of_chance


def _source(needed: list[Contents]) -> str:
    """The operator that makes what is read, as far as that is not computed yet."""
    recipe = needed[0].recipe if len(needed) == 1 else None
    return "" if recipe is None else str(recipe.func._schema.name)


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return tree_flatten((args, kwargs))[0]


def _is_on_meta(leaf: Any) -> bool:
    return (
        leaf.is_meta if isinstance(leaf, Tensor) else isinstance(leaf, torch.device) and leaf.type == "meta"
    )
