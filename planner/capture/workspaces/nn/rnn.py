"""Workspace rules of cuDNN's recurrent layers, and sizes of weights and reserve space.

cuDNN does not document the sizes of its reserve space and workspace. The formulas below give exactly the
sizes reported for a P100 in 2017 (LSTM: 736,000,000 and 17,730,560 bytes, GRU: 864,000,000 and 13,169,920;
pytorch/pytorch issue 2895) for four layers of width 320 over 123 inputs, 250 steps of 100 samples. The issue
names the number of parameters, from which layers and widths follow; steps and samples are inferred with the
formulas. Newer versions, half precision, dropout and projections are assumed to need the same sizes. The
emulated GPU answers by the same formulas (planner/emulator/csrc/cudnn_layers.c).
"""

from typing import Any, NamedTuple

from torch import Tensor

from planner.capture.workspaces._rule import contiguous_copies, released, tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, Keep, Ops, Output, Outputs, Rule
from planner.program import Target, threads_per_sm


class Mode(NamedTuple):
    """A kind of recurrent layer, with its number of gates and of vectors that training keeps.

    `name` is the value of `nn.RNNBase.mode`.
    """

    name: str
    gates: int
    reserve: int  # vectors of hidden width that training keeps per layer, direction and step


# In the order of cudnnRNNMode_t. An LSTM keeps the gates and the cell's state.
MODES = (Mode("RNN_RELU", 1, 1), Mode("RNN_TANH", 1, 1), Mode("LSTM", 4, 5), Mode("GRU", 3, 6))
MODE_NUMBERS = {mode.name: number for number, mode in enumerate(MODES)}


# Inferred for cudnnDropoutGetStatesSize: a curandState for each thread that the GPU can hold at once. torch's
# comment names "slightly over 2 MB", which agrees with an M40. The emulated GPU answers by the same formula.
_GENERATOR_BYTES = 48
FIRST_DROPOUT_DIM = 2  # rank of the placeholder for dropout's state in the call that makes it; 1 afterwards


class RnnSizes(NamedTuple):
    """The sizes of a recurrent layer, as `aten::_cudnn_rnn` takes them.

    >>> lstm, gru = (RnnSizes(mode, 123, 320, 0, 4, False) for mode in (2, 3))
    >>> lstm.weight_elements()
    3034880
    >>> lstm.reserve_bytes(250 * 100, 4), gru.reserve_bytes(250 * 100, 4)
    (736000000, 864000000)
    >>> lstm.workspace_bytes(100, 4), gru.workspace_bytes(100, 4)
    (17730560, 13169920)
    """

    mode: int  # cudnnRNNMode_t
    inputs: int
    hidden: int
    projected: int  # width of projected outputs; 0 without projection
    layers: int
    bidirectional: bool

    @property
    def directions(self) -> int:
        """Return the number of directions: 2 for a bidirectional layer, else 1."""
        return 2 if self.bidirectional else 1

    @property
    def width(self) -> int:
        """Return the width of one direction's output."""
        return self.projected or self.hidden

    def weight_elements(self) -> int:
        """Return the number of elements of cuDNN's flat weights. Both biases count even if unused."""
        per_row = 2 * MODES[self.mode].gates + self.projected
        return self._matrix_elements() + self.layers * self.directions * self.hidden * per_row

    def reserve_bytes(self, rows: int, element_bytes: int) -> int:
        """Return the bytes of the reserve space, which training keeps for the backward pass.

        The reserve space holds the states of cells, and the outputs of all layers except the last. `rows` is
        the number of steps times the number of samples.
        """
        vectors = MODES[self.mode].reserve + (1 if self.projected else 0)
        elements = self.layers * vectors * self.hidden + (self.layers - 1) * self.width
        return rows * self.directions * element_bytes * elements

    def workspace_bytes(self, samples: int, element_bytes: int) -> int:
        """Return the bytes of cuDNN's workspace for a batch of samples.

        The workspace has the transposed matrices, and vectors for each sample.
        """
        vectors = self.layers * self.directions * samples * self.hidden * (3 * MODES[self.mode].gates - 1)
        return element_bytes * (self._matrix_elements() + vectors)

    def _matrix_elements(self) -> int:
        """Return the number of elements of all weight matrices.

        Later layers read the outputs of all directions.
        """
        inputs = self.inputs + (self.layers - 1) * self.width * self.directions
        return self.directions * MODES[self.mode].gates * self.hidden * (inputs + self.layers * self.width)


def _workspace(x: Tensor, batch_sizes: list[int], *sizes: Any) -> int:
    """Return the bytes of cuDNN's workspace for the input `x` of a recurrent layer.

    `sizes` are `RnnSizes` without `inputs`.
    """
    samples = batch_sizes[0] if batch_sizes else x.shape[1]
    return RnnSizes(sizes[0], x.shape[-1], *sizes[1:]).workspace_bytes(samples, x.element_size())


def _steps_first(x: Tensor, batch_first: bool, batch_sizes: list[int]) -> Tensor:
    """Return a view of an input with steps as its first dimension. cuDNN needs this view to be contiguous."""
    return x.transpose(0, 1) if batch_first and not batch_sizes else x


def _forward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of a recurrent layer's forward pass: copies, outputs, dropout's state and a workspace.

    The state of dropout is made in the first call, before anything else; then the input is copied to be
    contiguous. A buffer is made for weights that are not in one.
    """
    x, _, _, buffer, _, _, mode, hidden, projected, layers, batch_first = args[:11]
    bidirectional, sizes, dropout = args[13:16]
    x = _steps_first(x, batch_first, sizes)
    space = _workspace(x, sizes, mode, hidden, projected, layers, bidirectional)
    states = Output(), Output(), Output()  # output, hy, cy; cy is empty except for an LSTM
    weights = () if buffer is not None else (Output(1),)  # the output after the reserve space
    state = _dropout_state(target) if dropout is not None and dropout.dim() == FIRST_DROPOUT_DIM else ()
    return (*state, *contiguous_copies(x), *states, *weights, Hold(space), Outputs())


def _dropout_state(target: Target) -> Ops:
    """Return the ops that make dropout's state: a temporary seed, and generators that are never freed.

    There is a generator for each of the GPU's threads. Source: cudnn/RNN.cpp.
    """
    return 8, Keep(_GENERATOR_BYTES * threads_per_sm(target.capability) * target.sm_count)


def _backward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of a recurrent layer's backward pass, or () if no output has a gradient.

    `_cudnn_rnn_backward_input` runs first, then `_cudnn_rnn_backward_weight`, each with a separate workspace.
    """
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
