"""Layouts of pointwise results: our meta kernels against torch's own."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.helpers.meta_kernels import FLOATS, agrees, allowed, aten, meta, ours, torchs

DTYPES = (*FLOATS, torch.int64, torch.bool, torch.complex64)


# ---- tensors of all layouts

sizes = st.sampled_from((0, 1, 1, 2, 3, 4))
shapes = st.lists(sizes, max_size=5).map(tuple)
solid_shapes = st.lists(sizes.filter(bool), max_size=5).map(tuple)
floats = st.sampled_from(FLOATS)
dtypes = st.sampled_from(DTYPES)


@st.composite
def laid_out(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape: contiguous, channels last, permuted, a slice of a larger one, or expanded."""
    how = draw(st.sampled_from(("contiguous", "channels_last", "permuted", "sliced", "stepped", "expanded")))
    rank = len(shape)
    if how == "channels_last" and rank == 4:
        return torch.empty(shape, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    if how == "permuted":
        order = draw(st.permutations(range(rank)))
        stored = torch.empty([shape[i] for i in order], dtype=dtype, device="meta")
        return stored.permute([order.index(i) for i in range(rank)])
    if how in ("sliced", "stepped", "expanded") and rank:
        dim = draw(st.integers(0, rank - 1))
        longer = list(shape)
        if how == "expanded":
            longer[dim] = 1
            return torch.empty(longer, dtype=dtype, device="meta").expand(shape)
        longer[dim] = 2 * shape[dim] + 1
        whole = torch.empty(longer, dtype=dtype, device="meta")
        step = 2 if how == "stepped" else 1
        return whole[(slice(None),) * dim + (slice(1, 1 + step * shape[dim], step),)]
    return torch.empty(shape, dtype=dtype, device="meta")


@st.composite
def operands(draw: st.DrawFn, count: int) -> list[Tensor]:
    """Tensors that broadcast in most cases, of one dtype in most cases."""
    shape = draw(shapes)
    dtype = draw(dtypes)
    tensors = []
    for _ in range(count):
        own = list(shape[draw(st.integers(0, len(shape))) if draw(st.integers(0, 4)) == 0 else 0 :])
        for dim in range(len(own)):
            if draw(st.integers(0, 5)) == 0:
                own[dim] = draw(st.sampled_from((1, 1, 1, 5)))
        kind = draw(dtypes) if draw(st.integers(0, 9)) == 0 else dtype
        tensors.append(draw(laid_out(tuple(own), kind)))
    return tensors


numbers = st.sampled_from((2, 0.5, True, 1 + 2j))

# ---- shortcuts that answer as torch does

UNARY = [
    aten.relu.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default, aten.tanh.default,
    aten.hardtanh.default, aten.hardswish.default, aten.hardsigmoid.default, aten.exp.default,
    aten.neg.default, aten.leaky_relu.default, aten.elu.default, aten.rsqrt.default, aten.sqrt.default,
    aten.reciprocal.default, aten.sin.default, aten.cos.default, aten.log.default, aten.abs.default,
]  # fmt: skip
WITH_NUMBER = [
    aten.mul.Scalar, aten.div.Scalar, aten.clamp_min.default, aten.eq.Scalar, aten.ne.Scalar, aten.ge.Scalar,
    aten.le.Scalar, aten.gt.Scalar, aten.lt.Scalar, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor,
    aten.div.Tensor, aten.rsub.Scalar, aten.pow.Tensor_Scalar, aten.leaky_relu.default,
]  # fmt: skip
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor]


@pytest.mark.slow
@pytest.mark.parametrize("func", UNARY, ids=str)
@settings(max_examples=150)
@given(tensors=operands(1))
def test_unary_operators(func: Any, tensors: list[Tensor]) -> None:
    """A pointwise operator over one tensor answers as torch's meta kernel, or not at all."""
    assert ours(func, *tensors) in allowed(func, *tensors)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("func", WITH_NUMBER, ids=str)
@settings(max_examples=150)
@given(tensors=operands(1), number=numbers)
def test_operators_with_a_number(func: Any, tensors: list[Tensor], number: Any) -> None:
    """A pointwise operator over a tensor and a number answers as torch's meta kernel, or not at all."""
    assert ours(func, *tensors, number) in allowed(func, *tensors, number)


@pytest.mark.slow
@pytest.mark.parametrize("func", BINARY, ids=str)
@settings(max_examples=400)
@given(tensors=operands(2))
def test_binary_operators(func: Any, tensors: list[Tensor]) -> None:
    """A pointwise operator over two tensors, broadcast or not, answers as torch does, or not at all."""
    assert ours(func, *tensors) in allowed(func, *tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_image_that_attention_gives_keeps_its_strides(dtype: torch.dtype) -> None:
    """Sizes of 1 keep their strides where a number or a second layout takes part, as on the CPU, so that a
    single image does not count as channels last; one tensor alone is put in order.
    """
    rows = torch.empty(1, 64, 128, dtype=dtype, device="meta")
    x, contiguous = rows.transpose(-1, -2).reshape(1, 128, 8, 8), meta(1, 128, 8, 8, dtype=dtype)
    unusual, ordered = (128, 1, 1024, 128), (8192, 1, 1024, 128)
    assert x.stride() == unusual
    assert ours(aten.div.Tensor, x, 1.0)[1] == ours(aten.add.Tensor, x, contiguous)[1] == unusual
    assert ours(aten.silu.default, x)[1] == ours(aten.pow.Tensor_Scalar, x, 2)[1] == ordered


@pytest.mark.slow
@settings(max_examples=400)
@given(tensors=operands(2), condition=st.data())
def test_where(tensors: list[Tensor], condition: st.DataObject) -> None:
    """A choice between two tensors answers as torch's meta kernel, or not at all."""
    chosen = condition.draw(laid_out(tuple(tensors[0].shape), condition.draw(st.sampled_from(DTYPES))))
    args = (chosen, *tensors)
    assert ours(aten.where.self, *args) in (NotImplemented, torchs(aten.where.self, *args))


@settings(max_examples=150)
@given(tensors=operands(1), low=st.none() | numbers, high=st.none() | numbers)
def test_clamp(tensors: list[Tensor], low: Any, high: Any) -> None:
    """A clamp between numbers answers as torch does, or not at all."""
    args = (*tensors, low, high)
    assert ours(aten.clamp.default, *args) in allowed(aten.clamp.default, *args)


@pytest.mark.parametrize("exponent", [0.5, 1, 1.0, 2, 2.0, 3, -1, 1.5])
@settings(max_examples=60)
@given(tensors=operands(1))
def test_powers(exponent: float, tensors: list[Tensor]) -> None:
    """Each power answers as torch does, which takes another way for some of them, or not at all."""
    func = aten.pow.Tensor_Scalar
    assert ours(func, *tensors, exponent) in allowed(func, *tensors, exponent)


# ---- derivatives of activations: CUDA has one kernel, torch's meta kernels compose several

DERIVATIVES: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.gelu_backward.default, ()),
    (aten.silu_backward.default, ()),
    (aten.sigmoid_backward.default, ()),
    (aten.tanh_backward.default, ()),
    (aten.hardtanh_backward.default, (0, 6)),
    (aten.hardswish_backward.default, ()),
    (aten.hardsigmoid_backward.default, ()),
]


@pytest.mark.parametrize(("func", "rest"), DERIVATIVES, ids=str)
@settings(max_examples=100)
@given(tensors=operands(2))
def test_derivatives(func: Any, rest: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """The gradient of an activation is laid out as a sum of the gradient and the input, in this order."""
    grad, x = tensors
    alike = grad.shape == x.shape and grad.dtype is x.dtype
    expected = ours(aten.add.Tensor, grad, x) if alike else NotImplemented
    assert ours(func, grad, x, *rest) == expected
    assert ours(aten.elu_backward.default, grad, 1, 1, 1, True, x) == expected
    swapped = ours(aten.add.Tensor, x, grad) if alike else NotImplemented
    assert ours(aten.threshold_backward.default, grad, x, 0) == swapped
    assert ours(aten.leaky_relu_backward.default, grad, x, 0.1, False) == swapped


@pytest.mark.parametrize(
    ("func", "rest"),
    [
        *DERIVATIVES,
        (aten.threshold_backward.default, (0,)),
        (aten.leaky_relu_backward.default, (0.1, True)),
    ],
    ids=str,
)
@settings(max_examples=50)
@given(shape=solid_shapes, dtype=floats)
def test_derivatives_of_contiguous_inputs(
    func: Any, rest: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """If gradient and input are contiguous, the gradient of an activation is laid out as in torch."""
    args = (torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape, dtype=dtype, device="meta"))
    assert ours(func, *args, *rest) == torchs(func, *args, *rest)


@settings(max_examples=50)
@given(shape=solid_shapes, dtype=floats)
def test_gradient_of_elu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The gradient of a contiguous ELU is laid out as in torch."""
    x = meta(*shape, dtype=dtype)
    agrees(aten.elu_backward.default, x, 1.0, 1.0, 1.0, True, x)
