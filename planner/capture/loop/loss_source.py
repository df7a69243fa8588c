"""Note which outputs of a model the loss uses.

There is no note if the model returns a single tensor, or if the loss is user code.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from planner.jobs import Loss, is_code, kind_text

MOST_NAMED = 6  # entries of an output that a note names


def notes_on_loss(kind: Loss | str, output: Any) -> tuple[str, ...]:
    """Return a tuple of one note on the model outputs that the loss uses, or () if no note is needed.

    `loss_of` computes the loss. No note is needed if the output is a tensor, or if the loss is user code.
    """
    if isinstance(output, Tensor) or is_code(kind):
        return ()
    if kind in (Loss.OUTPUT, Loss.TRAINING_STEP):
        taken, _ = returned_loss(output)
        return (f"the loss is {taken} that the model returns; its other outputs are not used",)
    names = [name for name, value in _entries(output) if floating_leaves(value)]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    shown = ", ".join(names[:MOST_NAMED]) + more
    several = len(floating_leaves(output)) > 1
    if kind is Loss.SUM:
        return (f"the loss is the sum of all elements of what the model returns as {shown}",)
    if several:
        return (f"the loss is the sum of the {kind} losses of what the model returns as {shown}",)
    return (f"the loss is the {kind} of what the model returns as {shown}",)


def returned_loss(output: Any) -> tuple[str, Any]:
    """Return the name and the value of the loss that a model returns.

    The name is for users. The loss is the value named `loss`, else the first scalar, as in `return logits,
    loss`, else the first value. Raises TypeError if the model returns no values.
    """
    named = getattr(output, "loss", None)
    if named is None and isinstance(output, Mapping):
        named = output.get("loss")
    if named is not None:
        return "'loss'", named
    entries = [*_entries(output)]
    if not entries:
        raise TypeError(f"the model returns {kind_text(output)} without values, so there is no loss")
    scalars = (pair for pair in entries if floating_leaves(pair[1]) and getattr(pair[1], "shape", None) == ())
    name, loss = next(scalars, entries[0])
    return ("the first of the values" if loss is entries[0][1] else name), loss


def _entries(output: Any) -> Iterator[tuple[str, Any]]:
    """Yield a (name, value) pair for each entry of an output.

    The name is for users. Entries are not searched for further entries. An output that is no mapping, tuple
    or list is one entry.
    """
    if isinstance(output, Mapping):
        yield from ((repr(name), value) for name, value in output.items())
    elif hasattr(output, "_fields"):  # a named tuple
        yield from ((repr(name), getattr(output, name)) for name in output._fields)
    elif isinstance(output, list | tuple):
        yield from ((f"output[{place}]", value) for place, value in enumerate(output))
    else:
        yield kind_text(output), output


def floating_leaves(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in an output, at any depth.

    Losses are computed from these tensors.
    """
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
