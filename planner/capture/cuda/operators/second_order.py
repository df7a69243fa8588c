"""Renumber the autograd nodes of second-order graphs as on CUDA.

The numbers decide the execution order. Autograd's engine runs the ready node with the highest sequence number
first, and each thread counts separately (ATen/SequenceNumber.cpp). On CUDA, a backward pass with
`create_graph` makes its nodes on the engine's thread for the GPU, whose numbers are low. On the meta device
it makes them on the caller's thread, with numbers above all others.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.autograd import graph

_OF_LEAVES = 2**63  # AccumulateGrad has the highest number (torch/csrc/autograd/function.h)


def patches() -> Iterator[tuple[str, object]]:
    """Yield the name and the replacement of the function that runs torch's autograd engine."""
    yield "torch.autograd._engine_run_backward", _renumbering(graph._engine_run_backward)


def _renumbering(plain: Callable[..., Any]) -> Callable[..., Any]:
    first = _get_sequence_nr()
    count = 0  # number of nodes that the engine's thread has made

    def run(
        outputs: Any, gradients: Any, retain_graph: bool, create_graph: bool, *args: Any, **kw: Any
    ) -> Any:
        nonlocal count
        before = _get_sequence_nr()
        results = plain(outputs, gradients, retain_graph, create_graph, *args, **kw)
        if create_graph:
            made = [one for one in results or () if isinstance(one, Tensor)] or _gradients_of_leaves(outputs)
            # The caller's own numbers have also advanced by `count`.
            for node in _nodes_since(made, before):
                node._set_sequence_nr(first + 2 * count + node._sequence_nr() - before)
            count += _get_sequence_nr() - before
        return results

    return run


def _nodes_since(tensors: Iterable[Tensor], first: int) -> list[Any]:
    """Return the non-leaf autograd nodes in the graphs of `tensors` whose number is at least `first`."""
    waiting = [one.grad_fn for one in tensors]
    found: dict[Any, None] = {}
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in found and first <= node._sequence_nr() < _OF_LEAVES:
            found[node] = None
            waiting += [inner for inner, _ in node.next_functions]
    return [*found]


def _gradients_of_leaves(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the leaf tensors in the graphs of `outputs`."""
    waiting: list[Any] = [one.grad_fn for one in outputs]
    seen: set[Any] = set()
    gradients = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.grad is not None:
            gradients.append(leaf.grad)
        waiting += [inner for inner, _ in node.next_functions]
    return gradients
