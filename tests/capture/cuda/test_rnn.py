"""Recurrent layers as cuDNN runs them: one operator, its spaces, flattened weights and their gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from planner.capture.workspaces.nn.rnn import MODE_NUMBERS, RnnSizes
from planner.jobs import Mode, Precision
from planner.program.events import Alloc, Category, Free, Trace, validate
from tests.capture.recorder.test_recorder import story
from tests.helpers.models import AMPERE, born, job_of, trace_of

CUDNN = "aten._cudnn_rnn.default"
CUDNN_BACKWARD = "aten._cudnn_rnn_backward.default"


def of_operator(trace: Trace, op: str) -> list[str]:
    """`+bytes` and `-bytes` of the blocks that this operator allocated, while it runs and after."""
    sizes = {
        e.block: e.size_bytes for e in trace.events if isinstance(e, Alloc) and trace.sites[e.site].op == op
    }
    lines = []
    for event in trace.events:
        if isinstance(event, Alloc | Free) and event.block in sizes:
            lines.append(f"{'+' if isinstance(event, Alloc) else '-'}{sizes[event.block]}")
    return lines


def test_sizes_are_those_that_nvidia_reported() -> None:
    """Reserve space and workspace of LSTM and GRU in pytorch/pytorch issue 2895."""
    layers = [RnnSizes(mode, 123, 320, 0, 4, False) for mode in (2, 3)]
    assert [layer.reserve_bytes(25_000, 4) for layer in layers] == [736_000_000, 864_000_000]
    assert [layer.workspace_bytes(100, 4) for layer in layers] == [17_730_560, 13_169_920]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_weights_are_counted_as_torch_counts_them(
    kind: type[nn.RNNBase], bidirectional: bool, layers: int
) -> None:
    """The flattened weights are the layer's parameters, and nothing between them."""
    layer = kind(5, 7, layers, bidirectional=bidirectional, device="meta")
    counted = RnnSizes(MODE_NUMBERS[layer.mode], 5, 7, 0, layers, bidirectional).weight_elements()
    assert counted == sum(p.numel() for p in layer.parameters())


def test_an_lstm_in_full() -> None:
    """One training step of LSTM(3, 5) on four samples of seven steps, every block in order."""
    trace = trace_of(lambda: Last(nn.LSTM(3, 5)), job_of("7x3", mode=Mode.TRAIN), 4)
    assert story(trace) == [
        "setup 0",
        "+240 parameters",  # weights of the input, of the state, and two biases, moved one after the other
        "+400 parameters",
        "+80 parameters",
        "+80 parameters",
        "+800 parameters",  # then together into one buffer
        "-240",
        "-400",
        "-80",
        "-80",
        "inputs 1",
        "+336 inputs",
        "forward 1",
        "+140 activations",  # zeros for the first states of seven samples: the batch is the steps here
        "+140 activations",
        "+560 activations",  # output: 4 x 7 x 5
        "+140 temporaries",  # last states
        "+140 temporaries",
        "+2180 workspaces",
        "+2800 activations",  # reserve space: 28 rows of 5 x 5
        "-2180",
        "-140",  # the last states are not needed
        "-140",
        "+4 activations",  # loss
        "backward 1",
        "+4 temporaries",
        "+140 workspaces",  # zeros for the gradients of the last states
        "+140 workspaces",
        "+560 workspaces",  # the output's gradient is expanded: a copy
        "+336 temporaries",  # the input's gradient, needed or not
        "+140 temporaries",
        "+140 temporaries",
        "+2180 workspaces",
        "-2180",
        "-560",
        "+800 gradients",  # one buffer
        "+2180 workspaces",
        "-2180",
        "-140",
        "-140",
        "-336",
        "-140",
        "-140",
        "-140",
        "-140",
        "-2800",
        "-4",
        "optimizer 1",
        "end 1",
    ]


class Last(nn.Module):
    """A recurrent layer without its last states."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


def test_inference_keeps_no_reserve_space() -> None:
    """Output, state and a workspace that goes with the operator."""
    trace = trace_of(lambda: Last(nn.GRU(3, 5)), job_of("7x3", mode=Mode.INFER), 4)
    assert of_operator(trace, CUDNN) == ["+560", "+140", "+1600", "-1600", "-140"]


def test_layers_and_directions_add_up() -> None:
    """Two layers in two directions: everything four times as wide but the input of the first layer."""
    trace = trace_of(lambda: Last(nn.LSTM(6, 5, 2, bidirectional=True)), job_of("16x6", mode=Mode.TRAIN), 8)
    matrices = 2 * 4 * 5 * (6 + 5) + 2 * 4 * 5 * (10 + 5)
    vectors = 4 * 16 * 5 * 11
    assert born(trace, CUDNN) == [
        8 * 16 * 10 * 4,
        4 * 16 * 5 * 4,
        4 * 16 * 5 * 4,
        4 * (matrices + vectors),
        8 * 16 * 2 * 4 * (2 * 5 * 5 + 5),
    ]


def test_batch_first_costs_a_contiguous_copy() -> None:
    """cuDNN wants steps first: the input is copied, and the result is a transposed view."""
    trace = trace_of(lambda: Last(nn.GRU(3, 5, batch_first=True)), job_of("7x3", mode=Mode.INFER), 4)
    assert of_operator(trace, CUDNN)[:2] == ["+336", "+560"]


def test_projections_narrow_the_output() -> None:
    """An LSTM with projections: outputs and hidden state of the projected width, cells of the full one."""
    trace = trace_of(lambda: Last(nn.LSTM(3, 6, proj_size=2)), job_of("7x3", mode=Mode.TRAIN), 4)
    assert born(trace, CUDNN)[:3] == [4 * 7 * 2 * 4, 7 * 2 * 4, 7 * 6 * 4]
    assert born(trace, CUDNN_BACKWARD)[-2] == 4 * (4 * 6 * (3 + 2 + 2) + 2 * 6)


def test_half_precision_halves_everything() -> None:
    """A model in float16."""
    sizes = [
        born(
            trace_of(lambda: Last(nn.GRU(4, 8)), job_of("7x4", mode=Mode.TRAIN, precision=precision), 4),
            CUDNN,
        )
        for precision in (Precision.FP16, Precision.FP32)
    ]
    assert [2 * size for size in sizes[0]] == sizes[1]


def test_bfloat16_needs_ampere() -> None:
    """Before compute capability 8.0 cuDNN has no recurrent layers in bfloat16, and torch unrolls them."""
    job = job_of("7x4", mode=Mode.INFER, precision=Precision.BF16)
    build = lambda: Last(nn.GRU(4, 8))  # noqa: E731
    assert born(trace_of(build, job, 4, (7, 5)), CUDNN) == []
    assert born(trace_of(build, job, 4, AMPERE), CUDNN) != []


def test_weights_in_bfloat16_are_copied_at_every_call() -> None:
    """`flatten_parameters` leaves bfloat16 alone: cuDNN gets a buffer of its own, before the workspace."""
    trace = trace_of(
        lambda: Last(nn.LSTM(4, 8)), job_of("7x4", mode=Mode.TRAIN, precision=Precision.BF16, steps=2), 4
    )
    layer = RnnSizes(2, 4, 8, 0, 1, False)
    weights = 2 * layer.weight_elements()
    parameters = [e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category == "parameters"]
    assert weights not in parameters
    states = [4 * 7 * 8 * 2, 7 * 8 * 2, 7 * 8 * 2]
    assert born(trace, CUDNN)[:5] == [*states, weights, layer.workspace_bytes(7, 2)]


class Packed(nn.Module):
    """Sequences of four, two and one steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([4, 2, 1]), batch_first=True)
        out: Tensor = self.layer(packed)[0].data
        return out


def test_packed_sequences_count_their_steps() -> None:
    """Seven rows instead of three times four."""
    trace = trace_of(Packed, job_of("4x3", mode=Mode.TRAIN), 3)
    assert born(trace, CUDNN)[0] == 7 * 5 * 4
    assert born(trace, CUDNN)[-1] == RnnSizes(3, 3, 5, 0, 1, False).reserve_bytes(7, 4)
    validate(trace)


def test_dropout_between_layers_makes_a_state_that_stays() -> None:
    """Once per process, a generator for each thread of the GPU, for all layers and steps; without dropout, or
    in evaluation, none.
    """
    model = lambda: nn.Sequential(  # noqa: E731
        Last(nn.GRU(3, 3, 2, dropout=0.1)), Last(nn.GRU(3, 3, 2, dropout=0.1))
    )
    for mode, states in ((Mode.TRAIN, 1), (Mode.INFER, 0)):
        trace = trace_of(model, job_of("7x3", mode=mode, steps=2), 2)
        large = [e for e in trace.events if isinstance(e, Alloc) and e.size_bytes > 2**20]
        freed = {e.block for e in trace.events if isinstance(e, Free)}
        assert [e.size_bytes for e in large] == [48 * 1536 * 84] * states
        assert not freed.intersection(e.block for e in large)


def test_gradients_are_views_of_one_buffer() -> None:
    """All gradients of a layer share a storage, as its weights do; nothing is copied to accumulate them."""
    trace = trace_of(lambda: Last(nn.LSTM(3, 5, 2)), job_of("7x3", mode=Mode.TRAIN, steps=2), 4)
    gradients = [e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category == "gradients"]
    assert gradients == [4 * RnnSizes(2, 3, 5, 0, 2, False).weight_elements()] * 2


class Flattened(nn.Module):
    """A recurrent layer whose weights are flattened before each call, as for DataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.flatten_parameters()
        return self.layer(x)[0]


def test_flattening_in_a_step_moves_the_weights_into_a_new_buffer() -> None:
    """Each call takes a second buffer for a moment, and frees the one that the weights leave."""
    trace = trace_of(Flattened, job_of("7x3", mode=Mode.TRAIN, steps=2), 4)
    validate(trace)
    buffer = 4 * RnnSizes(2, 3, 5, 0, 1, False).weight_elements()
    zeros = [line for line in of_operator(trace, "aten.zeros.default") if line[1:] == str(buffer)]
    assert zeros == [f"+{buffer}", f"+{buffer}", f"-{buffer}"]
    assert of_operator(trace, "flatten_parameters") == [f"+{buffer}", f"-{buffer}"]


class Twice(nn.Module):
    """A recurrent layer that runs a second time from the state of the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        first, state = self.layer(x)
        return first + self.layer(x, state)[0]


def test_gradients_of_two_calls_are_summed_beside_the_first_buffer() -> None:
    """Each sum takes its own block, but for the last, which is made in the first call's buffer.

    The buffer has other gradients in it while the first three are summed, so torch cannot sum in place.
    """
    trace = trace_of(Twice, job_of("7x3", mode=Mode.TRAIN, steps=1), 4)
    weights = [3 * 5 * 3 * 4, 3 * 5 * 5 * 4, 3 * 5 * 4, 3 * 5 * 4]
    buffer = sum(weights)
    names = {e.block: e for e in trace.events if isinstance(e, Alloc) and e.size_bytes in (*weights, buffer)}
    in_backward = [e for e in names.values() if e.category is Category.GRADIENT]
    assert [e.size_bytes for e in in_backward] == [buffer, *weights[:3]]
    freed = {e.block for e in trace.events if isinstance(e, Free)}
    assert not {e.block for e in in_backward} & freed


def test_autocast_casts_the_weights_into_a_new_buffer() -> None:
    """Input, states and all weights in float16, at every call; gradients of the weights in float32 again."""
    job = job_of("7x4", mode=Mode.TRAIN, precision=Precision.AMP_FP16)
    trace = trace_of(lambda: Last(nn.GRU(4, 8)), job, 4)
    weights = RnnSizes(3, 4, 8, 0, 1, False).weight_elements()
    assert born(trace, CUDNN)[0] == 4 * 7 * 8 * 2
    assert 2 * weights in born(trace, "aten.zeros.default")
    gradients = [e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category == "gradients"]
    assert sum(gradients) == 4 * weights


class Cell(nn.Module):
    """One step of a recurrent cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        """Return the new state."""
        state = self.cell(x)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize(("cell", "name", "kept"), [(nn.GRUCell, "gru", 5), (nn.LSTMCell, "lstm", 4)])
def test_one_kernel_computes_a_cell(cell: type[nn.RNNCellBase], name: str, kept: int) -> None:
    """ATen/native/RNN.cpp: two products of gates, the state, and what the backward pass needs."""
    trace = trace_of(lambda: Cell(cell(4, 8)), job_of("4", mode=Mode.TRAIN), 3)
    state, gates = 3 * 8 * 4, (3 if name == "gru" else 4) * 3 * 8 * 4
    assert born(trace, "aten.mm.default")[0:3:2] == [gates, gates]  # beside the workspace of cuBLAS
    states = [state] if name == "gru" else [state, state]
    assert born(trace, f"aten._thnn_fused_{name}_cell.default")[: len(states) + 1] == [*states, kept * state]
