"""Layouts of other results, awkward strides, and which cases our meta kernels take over."""

from typing import Any

import pytest
import torch
from torch import Tensor

from planner.capture.meta_kernels.run import MetaRunner
from planner.program import Phase
from tests.helpers.meta_kernels import FLOATS, agrees, allowed, aten, image, layout, meta, ours, torchs

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]  # shape, strides, dtype, bytes of storage


@pytest.mark.parametrize(
    ("shifts", "dims"), [([1], [0]), ([1, 2], [0, 1]), ([-1, 7], [-1, 1]), ([0, 0, 3], [0, 1, 2])]
)
def test_roll(shifts: list[int], dims: list[int]) -> None:
    """A roll is as in torch for contiguous tensors, and contiguous for others."""
    agrees(aten.roll.default, meta(2, 3, 4), shifts, dims)
    for x in (meta(4, 3, 2).permute(2, 1, 0), meta(2, 3, 8)[..., ::2], meta(1, 3, 4).expand(2, 3, 4)):
        assert ours(aten.roll.default, x, shifts, dims) == ((2, 3, 4), (12, 4, 1), torch.float32, 96)
    assert ours(aten.roll.default, meta(2, 3, 4), [1]) is NotImplemented
    assert ours(aten.roll.default, meta(2, 3, 4), [1, 2], [0]) is NotImplemented
    assert ours(aten.roll.default, meta(2, 3, 4), [1], [3]) is NotImplemented


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_log_sigmoid(dtype: torch.dtype) -> None:
    """The output is as in torch; the buffer, which the CPU fills, is empty on a GPU."""
    kernel = MetaRunner((8, 0)).run
    for x in (meta(2, 3, 4, dtype=dtype), meta(2, 4, 3, dtype=dtype).transpose(1, 2)):
        out, buffer = kernel(aten.log_sigmoid_forward.default, (x,), {}, Phase.FORWARD)
        assert layout(out) == layout(aten.log_sigmoid_forward.default(x)[0])
        assert (buffer.numel(), buffer.dtype) == (0, dtype)


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (2, 48, 16)])
def test_reflections_are_stored_by_columns(shape: tuple[int, ...]) -> None:
    """Columns are contiguous, as LAPACK stores them, with one factor each; torch has no meta kernel."""
    x = torch.rand(shape)
    reflections, factors = MetaRunner((8, 0)).run(aten.geqrf.default, (x.to("meta"),), {}, Phase.FORWARD)
    on_cpu = torch.geqrf(x)
    assert [t.shape for t in (reflections, factors)] == [t.shape for t in on_cpu]
    assert [t.stride() for t in (reflections, factors)] == [t.stride() for t in on_cpu]
    with pytest.raises(NotImplementedError):
        torch.geqrf(x.to("meta"))


@pytest.mark.parametrize(
    ("shape", "right"),
    [((6, 32, 16), (6, 32, 8)), ((6, 16, 32), (6, 16, 8)), ((6, 32, 16), (6, 32)), ((16, 16), (16,)),
     ((6, 32, 16), (1, 32, 8))],
)  # fmt: skip
def test_least_squares_are_stored_with_rows_for_residuals(
    shape: tuple[int, ...], right: tuple[int, ...]
) -> None:
    """Solutions and residuals are as on the CPU with the only algorithm of CUDA; torch has no meta kernel."""
    func, inputs = aten.linalg_lstsq.default, (torch.rand(shape), torch.rand(right))
    on_cpu = func(*inputs, driver="gels")
    on_meta = MetaRunner((8, 0)).run(func, tuple(x.to("meta") for x in inputs), {}, Phase.FORWARD)
    for made, expected in zip(on_meta, on_cpu, strict=True):
        assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert made.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_backward(dtype: torch.dtype) -> None:
    """The gradient of a softmax is as in torch for contiguous tensors, and contiguous for others."""
    x = meta(2, 3, 4, dtype=dtype)
    agrees(aten._softmax_backward_data.default, x, x, -1, dtype)
    transposed = meta(2, 4, 3, dtype=dtype).transpose(1, 2)
    assert ours(aten._softmax_backward_data.default, transposed, x, -1, dtype) == layout(x)
    assert ours(aten._softmax_backward_data.default, x, x, 3, dtype) is NotImplemented
    assert ours(aten._softmax_backward_data.default, x, x[:1], -1, dtype) is NotImplemented


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masked_fill(dtype: torch.dtype) -> None:
    """A filled copy is as in torch for contiguous tensors, and contiguous for others."""
    x, mask = meta(2, 3, 4, dtype=dtype), meta(2, 3, 4, dtype=torch.bool)
    agrees(aten.masked_fill.Scalar, x, mask, -100.0)
    transposed = meta(2, 4, 3, dtype=dtype).transpose(1, 2)
    assert ours(aten.masked_fill.Scalar, transposed, mask, -100.0) == layout(x)
    assert ours(aten.masked_fill.Scalar, x, mask[:1], -100.0) is NotImplemented
    assert ours(aten.masked_fill.Scalar, x, x, -100.0) is NotImplemented
    assert ours(aten.masked_fill.Scalar, x, mask, 1j) is NotImplemented


# ---- cases that random tensors seldom hit


def strided(*shape: int, strides: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor with any strides."""
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


HALF = meta(2, 1, 3, dtype=torch.float16)
AWKWARD: list[tuple[Any, tuple[Any, ...]]] = [
    # strides of dimensions of size 1 are kept by some kernels and put in order by others
    (aten.relu.default, (strided(1, 2, strides=(1, 1)),)),
    (aten.neg.default, (strided(1, 2, strides=(1, 1)),)),
    (aten.hardsigmoid.default, (strided(1, 1, 2, 1, 1, strides=(2, 1, 1, 1, 1)),)),
    (aten.add.Tensor, (strided(1, 1, 1, 4, 2, strides=(8, 2, 8, 2, 1)), meta(1, 1, 1, 4, 2))),
    (aten.add.Tensor, (image(2, 3, 1, 1), meta(2, 3, 1, 1))),
    # half precision is converted there and back
    (aten.add.Tensor, (HALF.expand(2, 4, 3), meta(3, 4, 2, dtype=torch.float16).permute(2, 1, 0))),
    (aten.exp.default, (HALF.transpose(0, 2).expand(3, 4, 2),)),
    (aten.sub.Tensor, (strided(2, 1, strides=(2, 1), dtype=torch.float16),) * 2),
    # channels last, with nothing contiguous beside it
    # dtypes that are promoted, and those that are refused
    (aten.add.Tensor, (meta(2, 3), meta(3, dtype=torch.float64))),
    # shapes that do not fit, and the empty tensor that `cat` passes over
    (aten.add.Tensor, (meta(2, 3), meta(2))),
]


@pytest.mark.parametrize(("func", "args"), AWKWARD, ids=[str(func) for func, _ in AWKWARD])
def test_awkward_cases(func: Any, args: tuple[Any, ...]) -> None:
    """If torch's kernels have ways of their own, the shortcut follows them or stays silent."""
    assert ours(func, *args) in allowed(func, *args)


# ---- frequent cases must be covered, or a trace takes ten times as long

SLICE = meta(2, 6, 4, 5)[:, 1:4]
HALF, MASK = meta(2, 3, dtype=torch.bfloat16), meta(2, dtype=torch.bool)
COVERED: list[tuple[Any, tuple[Any, ...], Layout]] = [
    (aten.add.Tensor, (meta(2, 3), meta(2, 3)), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.add.Tensor, (SLICE, SLICE), ((2, 3, 4, 5), (60, 20, 5, 1), torch.float32, 480)),
    (aten.mul.Tensor, (meta(3, 1, 1), image(2, 3, 4, 5)), ((2, 3, 4, 5), (60, 1, 15, 3), torch.float32, 480)),
    (
        aten.mul.Tensor,
        (meta(2, 3, 4, 5), meta(2, 3, 1, 1)),
        ((2, 3, 4, 5), (60, 20, 5, 1), torch.float32, 480),
    ),
    (aten.add.Tensor, (meta(3, 2).t(), meta(2, 3)), ((2, 3), (1, 2), torch.float32, 24)),
    (aten.add.Tensor, (meta(2, 3), meta(3, 2).t()), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.mul.Tensor, (meta(2, 3), 0.5), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.div.Scalar, (meta(2, 1).expand(2, 3), 3), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.gelu.default, (image(2, 3, 4, 5),), ((2, 3, 4, 5), (60, 1, 15, 3), torch.float32, 480)),
    (aten.ge.Scalar, (meta(2, 3), 0), ((2, 3), (3, 1), torch.bool, 6)),
    (aten.pow.Tensor_Scalar, (meta(2, 3), 3.0), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.mul.Tensor, (HALF, meta(1, 3)), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.mul.Tensor, (HALF, meta()), ((2, 3), (3, 1), torch.bfloat16, 12)),
]  # fmt: skip


@pytest.mark.parametrize(("func", "args", "expected"), COVERED, ids=[str(case[0]) for case in COVERED])
def test_frequent_cases_are_covered(func: Any, args: tuple[Any, ...], expected: Layout) -> None:
    """The cases that models are made of are answered, and as torch answers them."""
    assert ours(func, *args) == expected == torchs(func, *args)


@pytest.mark.parametrize(
    ("func", "options"),
    [
        (aten.mse_loss_backward.default, ()),
        (aten.smooth_l1_loss_backward.default, (1.0,)),
        (aten.huber_loss_backward.default, (1.0,)),
    ],
)
def test_gradients_of_losses_are_contiguous(func: Any, options: tuple[float, ...]) -> None:
    """Whatever the formats of input, target and gradient; targets of another shape are left to torch."""
    x, target = image(2, 3, 4, 5), meta(2, 3, 4, 5)
    expected = layout(target)
    for first, second in ((x, x), (x, target), (target, x), (x[:, :1].expand(2, 3, 4, 5), target)):
        assert ours(func, meta(), first, second, 1, *options) == expected
        assert ours(func, x, first, second, 0, *options) == expected
    agrees(func, meta(), target, target, 1, *options)
    assert ours(func, meta(), target, target[:1], 1, *options) is NotImplemented


def test_products_of_groups() -> None:
    """Results are torch's in bfloat16, alike in float32, which its meta kernel refuses; rows are padded."""
    offs = meta(3, dtype=torch.int32)
    for a, b, bounds in (
        (meta(32, 16), meta(3, 16, 24), offs),
        (meta(32, 16), meta(16, 24), offs),
        (meta(3, 8, 16), meta(3, 16, 24), None),
    ):
        agrees(aten._grouped_mm.default, a.to(torch.bfloat16), b.to(torch.bfloat16), bounds)
    assert ours(aten._grouped_mm.default, meta(32, 16), meta(3, 16, 5), offs) == (
        (32, 5), (8, 1), torch.float32, 4 * (31 * 8 + 5),
    )  # fmt: skip


def test_rms_norm_keeps_one_figure_per_row() -> None:
    """The result is contiguous, and the figure in single precision; gradients as requested."""
    x, weight = meta(2, 6, 4).transpose(1, 2), meta(6)
    y, figure = ((2, 4, 6), (24, 6, 1), torch.float32, 192), ((2, 4, 1), (4, 1, 1), torch.float32, 32)
    assert ours(aten._fused_rms_norm.default, x, [6], weight, None) == (y, figure)
    half = meta(2, 6, dtype=torch.bfloat16)
    assert ours(aten._fused_rms_norm.default, half, [6], None, None)[1] == ((2, 1), (1, 1), torch.float32, 8)
    backward = aten._fused_rms_norm_backward.default
    args = (x, x, [6], meta(2, 4, 1), weight)
    assert ours(backward, *args, [True, True]) == (y, ((6,), (1,), torch.float32, 24))
    assert ours(backward, *args, [False, True])[0] is None


def test_ctc_loss_is_sized_by_the_longest_target() -> None:
    """Known lengths count; unknown ones are as long as the targets' padding."""
    scores, targets = meta(50, 4, 20), meta(4, 30, dtype=torch.int64)
    for lengths, states in (([7, 9, 2, 1], 19), (torch.tensor([7, 9, 2, 1]), 19), (meta(4), 61)):
        loss, alpha = ours(aten._ctc_loss.default, scores, targets, [50] * 4, lengths)
        assert (loss[0], alpha[0]) == ((4,), (4, 50, states))
    assert ours(aten._ctc_loss_backward.default, meta(4), scores)[0] == (50, 4, 20)


def test_binary_cross_entropy_lies_in_a_whole_loss() -> None:
    """The scalar's storage holds a loss for every element."""
    x = meta(3, 4)
    assert ours(aten.soft_margin_loss.default, x, x) == ((), (), torch.float32, 48)
    assert ours(aten.binary_cross_entropy.default, x, x) == ((), (), torch.float32, 48)


@pytest.mark.parametrize("weight", [None, meta(2, 3, 4, 5)])
def test_binary_cross_entropy_has_the_strides_of_its_input(weight: Tensor | None) -> None:
    """The loss of each element, and its gradient, whatever the strides of target and weight."""
    x, other = meta(2, 3, 4, 5), image(2, 3, 4, 5)
    for given, target in ((x, other), (other, x), (x.mT, meta(2, 3, 5, 4))):
        of_input = given.shape, given.stride(), torch.float32, 480
        weighted = weight if given.shape == x.shape else None
        assert ours(aten.binary_cross_entropy.default, given, target, weighted, 0) == of_input
        assert ours(aten.binary_cross_entropy_backward.default, x, given, target, weighted, 0) == of_input
