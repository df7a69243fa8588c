"""Operators on meta take the paths, and the memory, that they take on a CUDA GPU."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.cuda.operators.semantics import cuda_semantics
from planner.jobs import Mode
from planner.program.events import Alloc, Category, Free
from tests.capture.recorder.test_recorder import Apply
from tests.helpers.models import AMPERE, HOPPER, MIB, born, job_of, trace_of


def test_dropout_keeps_a_boolean_mask() -> None:
    """The fused kernel keeps one byte an element, not a mask of floats; without training it keeps nothing."""
    assert born(trace_of(lambda: nn.Dropout(0.1), job_of("1000"), 2)) == [8000, 2000, 8000]
    assert born(trace_of(lambda: nn.Dropout(0.0), job_of("1000"), 2)) == [8000]
    assert born(trace_of(lambda: nn.Dropout(0.1), job_of("1000", mode=Mode.INFER), 2)) == [8000]


def test_linear_adds_its_bias_in_place_to_a_strided_input() -> None:
    """A transposed input is copied and multiplied, and the bias goes into the product: no second output."""
    trace = trace_of(lambda: _Transposed(), job_of("7x5"), 3)
    outputs = [size for size in born(trace) if size == 3 * 7 * 11 * 4]
    assert outputs == [3 * 7 * 11 * 4]


def test_linear_on_one_vector_is_one_product() -> None:
    """A contiguous input of any rank is a matrix to the product, whose epilogue adds the bias."""

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 11)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[0])

    assert born(trace_of(Row, job_of("5"), 3), "addmm")[0] == 11 * 4


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1))


def test_one_hot_is_one_tensor_of_whole_numbers() -> None:
    """CUDA scatters ones into zeros; neither a range of classes nor a comparison with it is made."""
    one_hot = lambda: Apply(lambda x: F.one_hot(x.argmax(-1), 7).float())  # noqa: E731
    trace = trace_of(one_hot, job_of("5", mode=Mode.INFER), 3)
    assert [size for size in born(trace) if size > 3 * 8] == [3 * 5 * 4, 3 * 7 * 8, 3 * 7 * 4]
    assert born(trace, "eq") == []


@pytest.mark.parametrize(("capability", "workspace"), [(AMPERE, 8_519_680), (HOPPER, 32 * MIB)])
def test_cublas_takes_one_workspace_a_thread_for_good(capability: tuple[int, int], workspace: int) -> None:
    """Training has two workspaces, inference one, and a model without products none; they never die."""
    layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # noqa: E731
    for mode, count in ((Mode.TRAIN, 2), (Mode.INFER, 1)):
        trace = trace_of(layer, job_of("4", mode=mode, steps=3), 2, capability)
        deaths = {event.block for event in trace.events if isinstance(event, Free)}
        taken = [e for e in trace.events if isinstance(e, Alloc) and e.category is Category.WORKSPACE]
        assert [e.size_bytes for e in taken if e.block not in deaths] == [workspace] * count
    assert Category.WORKSPACE not in {
        e.category for e in trace_of(lambda: Apply(torch.relu), job_of("4"), 2).events if isinstance(e, Alloc)
    }


def test_semantics_are_gone_afterwards() -> None:
    """After the context no kernel, patch or supported device is left."""
    x = torch.empty(2, 12, 197, 64, device="meta", requires_grad=True)
    before = torch._C._dispatch_dump("aten::scaled_dot_product_attention")
    with cuda_semantics(AMPERE):
        assert torch._C._dispatch_dump("aten::scaled_dot_product_attention") != before
        inside = F.scaled_dot_product_attention(x, x, x).grad_fn
    assert torch._C._dispatch_dump("aten::scaled_dot_product_attention") == before
    outside = F.scaled_dot_product_attention(x, x, x).grad_fn
    assert "Efficient" in type(inside).__name__
    assert "Efficient" not in type(outside).__name__
    assert nn.modules.activation._check_arg_device(torch.empty(1, device="meta")) is False


def test_two_at_once_are_refused() -> None:
    """The kernels are global to the process, so a second trace is turned away, in another thread as well."""
    errors: list[str] = []

    def enter() -> None:
        try:
            with cuda_semantics(AMPERE):
                pass
        except RuntimeError as error:
            errors.append(str(error))

    with cuda_semantics(AMPERE):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        enter()
    assert errors == ["another trace is running in this process; traces run one at a time"] * 2
    with cuda_semantics(AMPERE):
        pass


def test_a_number_is_assigned_to_a_part_from_the_cpu() -> None:
    """`x[1:3] = 2` takes no block for the number, by slices and integers; by a tensor it is copied over."""

    def assign(x: Tensor) -> Tensor:
        mask = x.new_zeros(4, 4)
        mask[1:3, ..., None] = 2
        mask[0] = True
        mask[1, 2] = 0.5
        return mask

    assert born(trace_of(lambda: Apply(assign), job_of("5", mode=Mode.INFER), 2)) == [40, 64]
    rows = torch.tensor([1, 3], device="meta")

    def scatter(x: Tensor) -> Tensor:
        mask = x.new_zeros(4, 4)
        mask[rows] = 2
        return mask

    assert born(trace_of(lambda: Apply(scatter), job_of("5", mode=Mode.INFER), 2))[:3] == [40, 64, 4]


def test_assignment_is_torchs_own_again_afterwards() -> None:
    """A tensor takes numbers as before once the semantics are closed."""
    before = Tensor.__setitem__
    with cuda_semantics(AMPERE):
        x = torch.zeros(3)
        x[1] = 2
        assert x.tolist() == [0, 2, 0]
    assert Tensor.__setitem__ is before
    assert "__setitem__" not in vars(Tensor)


def test_the_gradient_of_mish_is_one_kernel() -> None:
    """The backward pass of mish allocates its gradient alone, and no part of its formula."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1000))

        def forward(self, x: Tensor) -> Tensor:
            return F.mish(x * self.scale)

    trace = trace_of(Scaled, job_of("1000", mode=Mode.TRAIN), 2)
    assert born(trace, "mish_backward") == [8000]
    assert born(trace, "softplus") == born(trace, "tanh") == []


def test_a_matrix_is_factored_on_meta_while_cuda_semantics_are_open() -> None:
    """Constructors do, such as an orthogonal parametrization's; torch cannot on its own."""
    matrix = torch.empty(8, 4, device="meta")
    with cuda_semantics(AMPERE):
        layer = nn.utils.parametrizations.orthogonal(nn.Linear(8, 4, device="meta"))
        assert layer(matrix.mT).shape == (4, 4)
    with pytest.raises(NotImplementedError):
        torch.geqrf(matrix)
