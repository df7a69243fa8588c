"""The second tracer: values on the CPU for models whose course depends on values.

The first tracer has shapes only and stops where a model reads a value: a detector that keeps as many boxes as
pass a threshold, a mixture that sends each token to an expert. Here tensors stay on meta as well, so that
operators, autograd and the record are those of any other trace, but beside each storage stands how its values
come about. They are computed on the CPU when the model asks for some, and only those. What products,
convolutions and attention give is drawn at random instead, as random weights would give it; so no weights are
needed, and a batch costs little more than its shapes do. The generator starts from the same seed each time.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from planner.errors import ModelError
from planner.events import FROM_CHANCE, Phase
from planner.trace.recipes import DRAWN, Contents, Recipe, Ref, compute, draw, fill, layout_of, written_to
from planner.trace.shapes import run_on_meta
from planner.trace.weightless import build_with_values

aten = torch.ops.aten

SEED = 0
_CPU = torch.device("cpu")


class ValuesNeededError(ModelError):
    """A trace with shapes alone came to a place that needs values."""

    def __init__(self, model: str, place: str) -> None:
        super().__init__(
            f"{model}: {place}, which reads values of tensors that a plan cannot know; "
            "take that call out of the traced path"
        )
        self.place = place

    def note(self, values: "Values") -> str:
        """What the answer must say once the values were there."""
        if values.drew:
            return (
                f"{self.place}, which reads values: shapes that depend on them come from {FROM_CHANCE} on "
                "the CPU, not from data and trained weights"
            )
        return f"{self.place}, which reads values: they were computed on the CPU"


class Values:
    """Runs operators of one trace on meta and remembers how their values come about."""

    def __init__(self, known: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """`known` are pairs of a tensor with values and its like on meta."""
        self.drew = False  # whether anything that was read comes from chance
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
        is_empty = func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        if not (in_backward or is_empty or phase is Phase.OPTIMIZER):
            self._remember(recipe, args, kwargs, out)
        return out

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
            ref = self._noted(index)
            self._settle(ref.contents)
            count = int(ref.on(ref.contents.storage).count_nonzero())
            found += [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(index.dim())]
        return found

    def _run_at_once(
        self, recipe: Recipe, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> Any:
        """The result of an operator that meta has no answer for. Raises `error` where the CPU has none."""
        for contents in recipe.needed:
            self._settle(contents)
        stays = any(isinstance(leaf, torch.device) and leaf.type == "cpu" for leaf in _leaves(args, kwargs))
        try:
            out, copies = compute(recipe)
        except Exception:
            raise error from None
        if recipe.func is aten.nonzero.default:
            out = out.t().contiguous().t()  # a column after the other (native/cuda/Nonzero.cu)
        written = written_to(recipe.func, args, kwargs)
        for tensor in written:
            if not tensor.is_meta:
                continue
            before = self._of[tensor.untyped_storage()._cdata]
            storage = copies[id(before)]
            self._hold(tensor, Contents(storage.nbytes(), before.dtype, None, storage))
        if written:
            return written[0]
        return out if stays else tree_map(self._like, out)

    def _like(self, real: Any) -> Any:
        if not isinstance(real, Tensor):
            return real
        real = real.clone()  # without gaps, and laid out as it is where it had none
        like = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        if real.numel():
            storage = real.untyped_storage()
            self._hold(like, Contents(storage.nbytes(), real.dtype, None, storage))
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


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return tree_flatten((args, kwargs))[0]


def _is_on_meta(leaf: Any) -> bool:
    return (
        leaf.is_meta if isinstance(leaf, Tensor) else isinstance(leaf, torch.device) and leaf.type == "meta"
    )


# ---- the model


@contextmanager
def built_with_values() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While open, models are built with their parameters on meta, but buffers with their values.

    The list fills with pairs of a buffer and its like on meta.
    """
    known: list[tuple[Tensor, Tensor]] = []

    def build(construct: Callable[[], object]) -> object:
        model, pairs = build_with_values(construct)
        known.extend(pairs)
        return model

    with mock.patch("planner.trace.sources.build_weightless", build):
        yield known


@contextmanager
def values_kept() -> Iterator[None]:
    """While open, tensors made from Python's numbers keep them on the way to meta, and the generator, which
    is afterwards as it was, has started from the seed. One thread: most tensors are small.
    """
    threads = torch.get_num_threads()
    plain, new = torch.as_tensor, Tensor.new_tensor

    def tensor(
        data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any
    ) -> Tensor:
        made = plain(data, dtype=dtype).clone() if isinstance(data, Tensor) else plain(data, dtype=dtype)
        return made.to(device=device).requires_grad_(requires_grad)

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return plain(data, dtype=dtype).to(device=device)

    def new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
        if not self.is_meta:
            return new(self, data, **options)
        defaults: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return tensor(data, **(defaults | options))

    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        for owner, replacement in ((torch, tensor), (torch, as_tensor), (Tensor, new_tensor)):
            stack.enter_context(mock.patch.object(owner, replacement.__name__, replacement))
        torch.manual_seed(SEED)
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        yield
