"""Workspaces of cuDNN's recurrent layers, and sizes of their weights and reserve space.

cuDNN does not document the sizes of its reserve space and its workspace. The formulas below give exactly
those of a P100 in 2017 (LSTM: 736,000,000 and 17,730,560 bytes, GRU: 864,000,000 and 13,169,920;
pytorch/pytorch issue 2895) for four layers of width 320 over 123 inputs, 250 steps of 100 samples. The issue
names the number of parameters, from which layers and widths follow; steps and samples are inferred with the
formulas. Newer versions, half precision, dropout and projections are assumed to be alike.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from planner.capture.workspaces._rule import contiguous_copies, released, tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, Ops, Output, Outputs, Rule
from planner.program import Target


@dataclass(frozen=True, slots=True)
class Mode:
    """A kind of recurrent layer."""

    number: int  # cudnnRNNMode_t
    operator: str
    gates: int
    kept: int  # vectors as wide as the hidden state that training keeps per layer, direction and step


# nn.RNNBase.mode -> how cuDNN runs it
MODES = {
    "RNN_RELU": Mode(0, "rnn_relu", 1, 1),
    "RNN_TANH": Mode(1, "rnn_tanh", 1, 1),
    "LSTM": Mode(2, "lstm", 4, 5),  # the gates and the cell's state
    "GRU": Mode(3, "gru", 3, 6),
}
_BY_NUMBER = {mode.number: mode for mode in MODES.values()}


def weight_elements(
    mode: Mode, inputs: int, hidden: int, projected: int, layers: int, bidirectional: bool
) -> int:
    """Return the elements of the flattened weights: matrices and both biases of every layer, used or not.

    >>> weight_elements(MODES["LSTM"], 123, 320, 0, 4, False)
    3034880
    """
    directions = 2 if bidirectional else 1
    out = projected or hidden
    total = 0
    for layer in range(layers):
        width = inputs if layer == 0 else out * directions
        total += directions * (mode.gates * hidden * (width + out + 2) + projected * hidden)
    return total


def reserve_bytes(
    number: int, rows: int, hidden: int, projected: int, layers: int, directions: int, element_bytes: int
) -> int:
    """Return the bytes that training keeps: states of the cells, and outputs of all layers but the last.

    `rows` are steps times samples.

    >>> reserve_bytes(2, 250 * 100, 320, 0, 4, 1, 4), reserve_bytes(3, 250 * 100, 320, 0, 4, 1, 4)
    (736000000, 864000000)
    """
    mode = _BY_NUMBER[number]
    cells = layers * (mode.kept * hidden + (hidden if projected else 0))
    between = (layers - 1) * (projected or hidden)
    return rows * directions * element_bytes * (cells + between)


def workspace_bytes(
    number: int, inputs: int, samples: int, hidden: int, projected: int, layers: int, directions: int,
    element_bytes: int,
) -> int:  # fmt: skip
    """Return the bytes of the transposed matrices and some vectors per sample.

    >>> workspace_bytes(2, 123, 100, 320, 0, 4, 1, 4), workspace_bytes(3, 123, 100, 320, 0, 4, 1, 4)
    (17730560, 13169920)
    """
    mode = _BY_NUMBER[number]
    out = projected or hidden
    matrices = 0
    for layer in range(layers):
        width = inputs if layer == 0 else out * directions
        matrices += directions * mode.gates * hidden * (width + out)
    vectors = layers * directions * samples * hidden * (3 * mode.gates - 1)
    return element_bytes * (matrices + vectors)


def _workspace(
    x: Tensor,
    batch_sizes: list[int],
    mode: int,
    hidden: int,
    projected: int,
    layers: int,
    bidirectional: bool,
) -> int:
    samples, directions = batch_sizes[0] if batch_sizes else x.shape[1], 2 if bidirectional else 1
    return workspace_bytes(
        mode, x.shape[-1], samples, hidden, projected, layers, directions, x.element_size()
    )


def _steps_first(x: Tensor, batch_first: bool, batch_sizes: list[int]) -> Tensor:
    """Return the tensor with its steps first, as cuDNN needs it contiguous."""
    return x.transpose(0, 1) if batch_first and not batch_sizes else x


def _forward(args: Args, out: Any, target: Target) -> Ops:
    """Copy the input to be contiguous, and allocate the workspace before reserve space and weight buffer."""
    x, _, _, _, _, _, mode, hidden, projected, layers, batch_first, _, train, bidirectional, sizes = args[:15]
    x = _steps_first(x, batch_first, sizes)
    space = _workspace(x, sizes, mode, hidden, projected, layers, bidirectional)
    states = Output(), Output(), Output()  # output, hy, cy; the latter is empty but for an LSTM
    return (*contiguous_copies(x), *states, Hold(space), Outputs())


def _backward(args: Args, out: Any, target: Target) -> Ops:
    """Run `_cudnn_rnn_backward_input`, then `_cudnn_rnn_backward_weight`, each with its own workspace."""
    x, _, _, _, hx, cx, output, grad, grad_hy, grad_cy, mode, hidden, projected, layers, batch_first = args[
        :15
    ]
    bidirectional, sizes, mask = args[17], args[18], args[21]
    if out[0] is None:
        return ()
    zeros = [t for t, g in ((output, grad), (hx, grad_hy), (cx, grad_cy)) if g is None and t is not None]
    x = _steps_first(x, batch_first, sizes)
    space = _workspace(x, sizes, mode, hidden, projected, layers, bidirectional)
    copies = contiguous_copies(x, None if grad is None else _steps_first(grad, batch_first, sizes))
    states = (Output(),) * (2 if cx is None else 3)
    of_input = (*(Hold(tensor_bytes(t)) for t in zeros), *copies, *states, space, *released(copies))
    return (*of_input, *contiguous_copies(x), Outputs(), space) if mask[3] else of_input


RULES: dict[str, Rule] = {"_cudnn_rnn": _forward, "_cudnn_rnn_backward": _backward}
