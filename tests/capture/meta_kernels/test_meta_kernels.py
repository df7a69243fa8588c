"""Shortcuts past torch's meta kernels: what they return is what torch returns, or what CUDA's kernels do."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from planner.capture.cuda import rnn
from planner.capture.meta_kernels.cuda_layouts import KERNELS
from planner.capture.meta_kernels.run import META_KERNELS

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.bool, torch.complex64)
RAISES = "raises"

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]  # shape, strides, dtype, bytes of storage


def layout(output: Any) -> Any:
    """What of an output decides memory; the same nesting."""
    if isinstance(output, Tensor):
        assert output.is_meta
        return tuple(output.shape), output.stride(), output.dtype, output.untyped_storage().nbytes()
    return tuple(map(layout, output)) if isinstance(output, tuple | list) else output


def torchs(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The layout that torch's own meta kernel gives, or that it raises."""
    try:
        return layout(func(*args, **kwargs))
    except (
        RuntimeError,
        ValueError,
        IndexError,
        TypeError,
        NotImplementedError,
        AssertionError,
        ArithmeticError,
    ):
        return RAISES


def allowed(func: Any, *args: Any) -> tuple[Any, ...]:
    """The answers that a pointwise shortcut may give: none, that of torch's meta kernel, or that of its CPU
    kernel, which puts strides in order as CUDA's does where only dimensions of size 1 tell formats apart.
    """

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).fill_(1)

    def on_cpu(*values: Any) -> Tensor:
        found = func(*map(real, values))
        return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="meta")

    return NotImplemented, torchs(func, *args), torchs(on_cpu, *args)


def ours(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The layout that the shortcut gives."""
    out = META_KERNELS[func](*args, **kwargs)
    return out if out is NotImplemented else layout(out)


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
    aten.div.Tensor, aten.add_.Tensor, aten.div_.Tensor, aten.mul_.Tensor, aten.rsub.Scalar,
    aten.div_.Scalar, aten.mul_.Scalar, aten.pow_.Scalar, aten.clamp_min_.default, aten.pow.Tensor_Scalar,
    aten.leaky_relu.default, aten.leaky_relu_.default,
]  # fmt: skip
BINARY = [
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.add_.Tensor, aten.div_.Tensor,
    aten.mul_.Tensor,
]  # fmt: skip
IN_PLACE = [
    aten.silu_.default, aten.hardtanh_.default, aten.hardswish_.default, aten.leaky_relu_.default,
    aten.elu_.default, aten.rsqrt_.default, aten.sqrt_.default,
]  # fmt: skip


@pytest.mark.parametrize("func", [*UNARY, *IN_PLACE], ids=str)
@settings(max_examples=150, deadline=None)
@given(tensors=operands(1))
def test_unary_operators(func: Any, tensors: list[Tensor]) -> None:
    """A pointwise operator over one tensor answers as torch's meta kernel, or not at all."""
    assert ours(func, *tensors) in allowed(func, *tensors)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("func", WITH_NUMBER, ids=str)
@settings(max_examples=150, deadline=None)
@given(tensors=operands(1), number=numbers)
def test_operators_with_a_number(func: Any, tensors: list[Tensor], number: Any) -> None:
    """A pointwise operator over a tensor and a number answers as torch's meta kernel, or not at all."""
    assert ours(func, *tensors, number) in allowed(func, *tensors, number)


@pytest.mark.parametrize("func", BINARY, ids=str)
@settings(max_examples=400, deadline=None)
@given(tensors=operands(2))
def test_binary_operators(func: Any, tensors: list[Tensor]) -> None:
    """A pointwise operator over two tensors, broadcast or not, answers as torch does, or not at all."""
    assert ours(func, *tensors) in allowed(func, *tensors)


@settings(max_examples=400, deadline=None)
@given(tensors=operands(2), condition=st.data())
def test_where(tensors: list[Tensor], condition: st.DataObject) -> None:
    """A choice between two tensors answers as torch's meta kernel, or not at all."""
    chosen = condition.draw(laid_out(tuple(tensors[0].shape), condition.draw(st.sampled_from(DTYPES))))
    args = (chosen, *tensors)
    assert ours(aten.where.self, *args) in (NotImplemented, torchs(aten.where.self, *args))


@settings(max_examples=150, deadline=None)
@given(tensors=operands(1), low=st.none() | numbers, high=st.none() | numbers)
def test_clamp(tensors: list[Tensor], low: Any, high: Any) -> None:
    """A clamp between numbers answers as torch's meta kernel, or not at all."""
    args = (*tensors, low, high)
    assert ours(aten.clamp.default, *args) in (NotImplemented, torchs(aten.clamp.default, *args))


@settings(max_examples=150, deadline=None)
@given(tensors=operands(1), low=st.none() | numbers, high=st.none() | numbers)
def test_clamp_in_place(tensors: list[Tensor], low: Any, high: Any) -> None:
    """A clamp in place answers as torch's meta kernel, or not at all."""
    args = (*tensors, low, high)
    assert ours(aten.clamp_.default, *args) in (NotImplemented, torchs(aten.clamp_.default, *args))


@pytest.mark.parametrize("exponent", [0.5, 1, 1.0, 2, 2.0, 3, -1, 1.5])
@settings(max_examples=60, deadline=None)
@given(tensors=operands(1))
def test_powers(exponent: float, tensors: list[Tensor]) -> None:
    """Each power answers as torch's meta kernel, which takes another way for some of them, or not at all."""
    for func in (aten.pow.Tensor_Scalar, aten.pow_.Scalar):
        assert ours(func, *tensors, exponent) in (NotImplemented, torchs(func, *tensors, exponent))


@settings(max_examples=200, deadline=None)
@given(tensors=operands(2), weight=numbers)
def test_lerp_in_place(tensors: list[Tensor], weight: Any) -> None:
    """A step towards another tensor answers as torch's meta kernel, or not at all."""
    args = (*tensors, weight)
    assert ours(aten.lerp_.Scalar, *args) in (NotImplemented, torchs(aten.lerp_.Scalar, *args))


@pytest.mark.parametrize("func", [aten.addcmul_.default, aten.addcdiv_.default], ids=str)
@settings(max_examples=200, deadline=None)
@given(tensors=operands(3), value=numbers)
def test_blends_in_place(func: Any, tensors: list[Tensor], value: Any) -> None:
    """The addition of a product or a quotient answers as torch's meta kernel, or not at all."""
    assert ours(func, *tensors, value=value) in (NotImplemented, torchs(func, *tensors, value=value))


# ---- lists of tensors


@st.composite
def tensor_lists(draw: st.DrawFn, count: int) -> list[list[Tensor]]:
    """Lists that agree tensor by tensor in most cases."""
    layouts = draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=3))
    dtype = draw(floats)
    lists = []
    for _ in range(count):
        kinds = [other if draw(st.integers(0, 9)) == 0 else dtype for _, other in layouts]
        lists.append([draw(laid_out(shape, kind)) for (shape, _), kind in zip(layouts, kinds, strict=True)])
    return lists


FOREACH = [
    *((func, 1, (2.0,)) for func in (
        aten._foreach_add_.Scalar, aten._foreach_mul_.Scalar,
    )),
    *((func, 1, ()) for func in (
        aten._foreach_sqrt_.default, aten._foreach_sqrt.default, aten._foreach_neg.default,
    )),
    *((func, 2, ()) for func in (aten._foreach_add_.List, aten._foreach_add.List)),
    (aten._foreach_lerp_.Scalar, 2, (0.1,)),
    (aten._foreach_addcmul_.Scalar, 3, (0.1,)),
    (aten._foreach_addcdiv_.Scalar, 3, (0.1,)),
]  # fmt: skip


@pytest.mark.parametrize(("func", "count", "rest"), FOREACH, ids=str)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_lists_of_tensors(func: Any, count: int, rest: tuple[Any, ...], data: st.DataObject) -> None:
    """An operator over lists of tensors answers as torch's meta kernel, or not at all."""
    lists = data.draw(tensor_lists(count))
    assert ours(func, *lists, *rest) in (NotImplemented, torchs(func, *lists, *rest))


@pytest.mark.parametrize(
    ("func", "count"), [(aten._foreach_div_.ScalarList, 1), (aten._foreach_addcdiv_.ScalarList, 3)], ids=str
)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_lists_of_tensors_and_numbers(func: Any, count: int, data: st.DataObject) -> None:
    """An operator over lists of tensors and one of numbers answers as torch's meta kernel, or not at all."""
    lists = data.draw(tensor_lists(count))
    steps = [0.5] * data.draw(st.sampled_from((len(lists[0]), len(lists[0]), 2)))
    assert ours(func, *lists, steps) in (NotImplemented, torchs(func, *lists, steps))


@settings(max_examples=100, deadline=None)
@given(lists=tensor_lists(1), shape=st.sampled_from(((), (), (1,))), data=st.data())
def test_lists_of_tensors_and_one_factor(
    lists: list[list[Tensor]], shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Scaling a list by a number on the GPU answers as torch's meta kernel, or not at all."""
    factor = data.draw(laid_out(shape, data.draw(st.just(lists[0][0].dtype) | dtypes)))
    func = aten._foreach_mul_.Tensor
    assert ours(func, *lists, factor) in (NotImplemented, torchs(func, *lists, factor))


# ---- new tensors and copies

formats = st.sampled_from(
    (None, torch.preserve_format, torch.contiguous_format, torch.contiguous_format, torch.channels_last)
)
devices = st.sampled_from((None, torch.device("meta"), torch.device("meta"), torch.device("cpu")))
LIKES = [aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten._to_copy.default]


@pytest.mark.parametrize("func", LIKES, ids=str)
@settings(max_examples=200, deadline=None)
@given(
    tensors=operands(1),
    dtype=st.none() | dtypes,
    device=st.none() | st.just(torch.device("meta")),
    form=formats,
)
def test_tensors_like_others(
    func: Any, tensors: list[Tensor], dtype: torch.dtype | None, device: torch.device | None, form: Any
) -> None:
    """A tensor as large as another answers as torch's meta kernel, or not at all."""
    options = {"dtype": dtype, "device": device, "memory_format": form}
    assert ours(func, *tensors, **options) in (NotImplemented, torchs(func, *tensors, **options))


@settings(max_examples=200, deadline=None)
@given(tensors=operands(1), form=formats)
def test_clones(tensors: list[Tensor], form: Any) -> None:
    """A clone answers as torch's meta kernel, or not at all."""
    func = aten.clone.default
    assert ours(func, *tensors, memory_format=form) in (
        NotImplemented,
        torchs(func, *tensors, memory_format=form),
    )


@settings(max_examples=100, deadline=None)
@given(tensors=operands(1), dtype=st.none() | dtypes, form=formats)
def test_full_like(tensors: list[Tensor], dtype: torch.dtype | None, form: Any) -> None:
    """A filled tensor as large as another answers as torch's meta kernel, or not at all."""
    func, options = aten.full_like.default, {"dtype": dtype, "memory_format": form}
    assert ours(func, *tensors, 1, **options) in (NotImplemented, torchs(func, *tensors, 1, **options))


@pytest.mark.parametrize("func", [*LIKES, aten.clone.default], ids=str)
def test_tensors_like_others_elsewhere(func: Any) -> None:
    """Copies from the CPU, or to it, are left to torch."""
    assert META_KERNELS[func](torch.empty(2)) is NotImplemented
    assert META_KERNELS[func](meta(2), device=torch.device("cpu")) is NotImplemented
    assert META_KERNELS[func](meta(2), pin_memory=True) is NotImplemented


FACTORIES = [aten.zeros.default, aten.ones.default, aten.empty.memory_format]


@pytest.mark.parametrize("func", FACTORIES, ids=str)
@settings(max_examples=100, deadline=None)
@given(shape=shapes, dtype=st.none() | dtypes)
def test_factories(func: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """A new tensor on meta answers as torch's meta kernel, or not at all."""
    options = {"dtype": dtype, "device": torch.device("meta")}
    assert ours(func, shape, **options) in (NotImplemented, torchs(func, shape, **options))


@settings(max_examples=100, deadline=None)
@given(shape=shapes, dtype=st.none() | dtypes, value=numbers)
def test_filled_tensors(shape: tuple[int, ...], dtype: torch.dtype | None, value: Any) -> None:
    """A filled tensor, and one of a single number, answer as torch's meta kernels, or not at all."""
    options = {"dtype": dtype, "device": torch.device("meta")}
    for func, args in ((aten.full.default, (shape, value)), (aten.scalar_tensor.default, (value,))):
        assert ours(func, *args, **options) in (NotImplemented, torchs(func, *args, **options))


@pytest.mark.parametrize("func", FACTORIES, ids=str)
def test_factories_elsewhere(func: Any) -> None:
    """A new tensor on the CPU is left to torch, and so are sizes that make no sense."""
    assert META_KERNELS[func]([2, 3]) is NotImplemented
    assert META_KERNELS[func]([2, 3], device=torch.device("cpu")) is NotImplemented
    assert META_KERNELS[func]([2, -3], device=torch.device("meta")) is NotImplemented


@pytest.mark.parametrize(
    "func", [aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default], ids=str
)
@settings(max_examples=100, deadline=None)
@given(tensors=operands(1), shape=shapes, dtype=st.none() | dtypes, device=devices)
def test_factories_beside_a_tensor(
    func: Any, tensors: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype | None,
    device: torch.device | None,
) -> None:  # fmt: skip
    """A new tensor beside another answers as torch's meta kernel, or not at all."""
    options = {"dtype": dtype, "device": device}
    if device is not None and device.type == "cpu":
        assert ours(func, *tensors, shape, **options) is NotImplemented
    else:
        assert ours(func, *tensors, shape, **options) in (
            NotImplemented,
            torchs(func, *tensors, shape, **options),
        )


dims = st.none() | st.lists(st.integers(-6, 5), max_size=3)


@pytest.mark.parametrize("func", [aten.sum.dim_IntList, aten.mean.dim], ids=str)
@settings(max_examples=300, deadline=None)
@given(tensors=operands(1), dims=dims, keepdim=st.booleans())
def test_reductions(func: Any, tensors: list[Tensor], dims: list[int] | None, keepdim: bool) -> None:
    """A sum or a mean over any dimensions answers as torch's meta kernel, or not at all."""
    args = (*tensors, dims, keepdim)
    assert ours(func, *args) in (NotImplemented, torchs(func, *args))


@settings(max_examples=300, deadline=None)
@given(tensors=operands(1), order=st.sampled_from((2, 2.0, 1)), dims=dims, keepdim=st.booleans())
def test_vector_norm(tensors: list[Tensor], order: float, dims: list[int] | None, keepdim: bool) -> None:
    """A norm over any dimensions answers as torch's meta kernel, or not at all."""
    args = (*tensors, order, dims, keepdim)
    assert ours(aten.linalg_vector_norm.default, *args) in (
        NotImplemented,
        torchs(aten.linalg_vector_norm.default, *args),
    )


@st.composite
def factors(draw: st.DrawFn, rank: int) -> list[Tensor]:
    """Two matrices, or two batches of them, whose inner dimensions agree in most cases; one dtype mostly."""
    lead = tuple(draw(sizes) for _ in range(rank - 2))
    rows, inner, columns, other = (draw(sizes) for _ in range(4))
    dtype = draw(dtypes)
    right = draw(dtypes) if draw(st.integers(0, 9)) == 0 else dtype
    if draw(st.integers(0, 9)):
        other = inner
    return [draw(laid_out((*lead, rows, inner), dtype)), draw(laid_out((*lead, other, columns), right))]


@settings(max_examples=300, deadline=None)
@given(pair=factors(2))
def test_mm(pair: list[Tensor]) -> None:
    """A matrix product answers as torch's meta kernel, or not at all."""
    assert ours(aten.mm.default, *pair) in (NotImplemented, torchs(aten.mm.default, *pair))


@settings(max_examples=300, deadline=None)
@given(pair=factors(3))
def test_bmm(pair: list[Tensor]) -> None:
    """A batch of matrix products answers as torch's meta kernel, or not at all."""
    assert ours(aten.bmm.default, *pair) in (NotImplemented, torchs(aten.bmm.default, *pair))


@settings(max_examples=300, deadline=None)
@given(pair=factors(2), bias=st.data())
def test_addmm(pair: list[Tensor], bias: st.DataObject) -> None:
    """A product with a bias answers as torch's meta kernel, or not at all."""
    columns = bias.draw(st.sampled_from((pair[1].shape[1], 1, 2)))
    shape = bias.draw(st.sampled_from(((columns,), (1, columns), ())))
    args = (bias.draw(laid_out(shape, pair[0].dtype)), *pair)
    assert ours(aten.addmm.default, *args) in (NotImplemented, torchs(aten.addmm.default, *args))


@settings(max_examples=500, deadline=None)
@given(tensors=operands(2) | operands(1) | operands(3), dim=st.integers(-6, 5))
def test_cat(tensors: list[Tensor], dim: int) -> None:
    """Joined tensors are laid out as torch's meta kernel says, or not at all."""
    assert ours(aten.cat.default, tensors, dim) in (NotImplemented, torchs(aten.cat.default, tensors, dim))


@settings(max_examples=200, deadline=None)
@given(tensors=operands(2) | operands(1), rows=st.integers(0, 2), dim=st.integers(-6, 5), data=st.data())
def test_cat_with_empty_rows(tensors: list[Tensor], rows: int, dim: int, data: st.DataObject) -> None:
    """Rows of no elements are left out of what is joined, as torch does, or not at all."""
    row = meta(rows // 2, dtype=tensors[0].dtype)
    args = (data.draw(st.permutations([row, *tensors])), dim)
    assert ours(aten.cat.default, *args) in (NotImplemented, torchs(aten.cat.default, *args))


@settings(max_examples=200, deadline=None)
@given(shape=shapes, count=st.integers(1, 3), dim=st.integers(-6, 5), data=st.data())
def test_stack(shape: tuple[int, ...], count: int, dim: int, data: st.DataObject) -> None:
    """Stacked tensors are laid out as torch's meta kernel says, or not at all."""
    dtype = data.draw(dtypes)
    tensors = [data.draw(laid_out(shape, dtype)) for _ in range(count)]
    if count > 1 and data.draw(st.integers(0, 4)) == 0:
        tensors[1] = data.draw(laid_out(data.draw(shapes), data.draw(dtypes)))
    assert ours(aten.stack.default, tensors, dim) in (
        NotImplemented,
        torchs(aten.stack.default, tensors, dim),
    )


@settings(max_examples=300, deadline=None)
@given(shape=shapes, dim=st.integers(-6, 5), index=st.integers(-4, 4), data=st.data())
def test_select_backward(shape: tuple[int, ...], dim: int, index: int, data: st.DataObject) -> None:
    """The gradient of an index answers as torch's meta kernel, or not at all."""
    gone = dim % len(shape) if shape else 0
    own = data.draw(st.sampled_from(((*shape[:gone], *shape[gone + 1 :]), shape)))
    args = (data.draw(laid_out(own, data.draw(dtypes))), shape, dim, index)
    assert ours(aten.select_backward.default, *args) in (
        NotImplemented,
        torchs(aten.select_backward.default, *args),
    )


@settings(max_examples=300, deadline=None)
@given(
    shape=shapes, dim=st.integers(-6, 5), start=st.integers(-5, 5),
    end=st.integers(-5, 5) | st.just(2**63 - 1), step=st.integers(0, 3), data=st.data(),
)  # fmt: skip
def test_slice_backward(
    shape: tuple[int, ...], dim: int, start: int, end: int, step: int, data: st.DataObject
) -> None:
    """The gradient of a slice answers as torch's meta kernel, or not at all."""
    own = list(shape)
    if -len(shape) <= dim < len(shape) and step:
        taken = len(range(*slice(start, end, step).indices(shape[dim])))
        own[dim] = data.draw(st.sampled_from((taken, taken, 2)))
    args = (data.draw(laid_out(tuple(own), data.draw(dtypes))), shape, dim, start, end, step)
    assert ours(aten.slice_backward.default, *args) in (
        NotImplemented,
        torchs(aten.slice_backward.default, *args),
    )


@settings(max_examples=200, deadline=None)
@given(tensors=operands(2), dim=st.integers(-6, 5), to_float=st.booleans(), dtype=st.none() | dtypes)
def test_log_softmax(tensors: list[Tensor], dim: int, to_float: bool, dtype: torch.dtype | None) -> None:
    """A softmax, its logarithm and the gradient of that answer as torch's meta kernels, or not at all."""
    forward = (tensors[0], dim, to_float)
    for func in (aten._log_softmax.default, aten._softmax.default):
        assert ours(func, *forward) in (NotImplemented, torchs(func, *forward))
    backward = (*tensors, dim, dtype or tensors[0].dtype)
    assert ours(aten._log_softmax_backward_data.default, *backward) in (
        NotImplemented,
        torchs(aten._log_softmax_backward_data.default, *backward),
    )


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(sizes, min_size=1, max_size=3).map(tuple),
    dtype=dtypes, rows=st.none() | sizes, weighted=st.booleans(), reduction=st.integers(0, 2), data=st.data(),
)  # fmt: skip
def test_nll_loss(
    shape: tuple[int, ...], dtype: torch.dtype, rows: int | None, weighted: bool, reduction: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    """The loss over classes and its gradient answer as torch's meta kernels, or not at all."""
    x = data.draw(laid_out(shape, dtype))
    target = torch.empty(shape[0] if rows is None else rows, dtype=torch.int64, device="meta")
    weight = torch.empty(shape[-1], dtype=dtype, device="meta") if weighted else None
    args = (x, target, weight, reduction, -100)
    assert ours(aten.nll_loss_forward.default, *args) in (
        NotImplemented,
        torchs(aten.nll_loss_forward.default, *args),
    )
    grad = torch.empty(target.shape if reduction == 0 else (), dtype=dtype, device="meta")
    total = torch.empty((), dtype=dtype, device="meta")
    assert ours(aten.nll_loss_backward.default, grad, *args, total) in (
        NotImplemented,
        torchs(aten.nll_loss_backward.default, grad, *args, total),
    )


@settings(max_examples=150, deadline=None)
@given(tensors=operands(1), train=st.sampled_from((True, False, None)))
def test_native_dropout(tensors: list[Tensor], train: bool | None) -> None:
    """Dropout with its mask answers as torch's meta kernel, or not at all."""
    args = (*tensors, 0.5, train)
    assert ours(aten.native_dropout.default, *args) in (
        NotImplemented,
        torchs(aten.native_dropout.default, *args),
    )


def test_foreach_in_place() -> None:
    """Adding lists in place returns nothing; lists that do not pair up are left to torch."""
    a, b = torch.empty(2, 3, device="meta"), torch.empty(3, device="meta")
    shortcut = META_KERNELS[aten._foreach_add_.List]
    assert shortcut([a, b], [a, b], alpha=-1) is None
    assert shortcut([a, b], [a]) is NotImplemented
    assert shortcut([a], [b]) is NotImplemented
    assert shortcut([a], [a.to(torch.float16)]) is NotImplemented
    assert shortcut([torch.empty(2)], [torch.empty(2)]) is NotImplemented


@pytest.mark.parametrize("func", IN_PLACE, ids=str)
def test_in_place_operators_return_their_argument(func: Any) -> None:
    """What an operator in place returns is the tensor that it was given."""
    x = torch.empty(2, 3, device="meta")
    assert META_KERNELS[func](x) is x


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
@settings(max_examples=100, deadline=None)
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
@settings(max_examples=50, deadline=None)
@given(shape=solid_shapes, dtype=floats)
def test_derivatives_of_contiguous_inputs(
    func: Any, rest: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Where gradient and input are contiguous, the gradient of an activation is laid out as torch says."""
    args = (torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape, dtype=dtype, device="meta"))
    assert ours(func, *args, *rest) == torchs(func, *args, *rest)


@settings(max_examples=100, deadline=None)
@given(tensors=operands(2), masked=st.booleans())
def test_gradient_of_dropout(tensors: list[Tensor], masked: bool) -> None:
    """The gradient of dropout answers as torch's meta kernel, or not at all."""
    grad, mask = tensors
    args = (grad, mask.to(torch.bool) if masked else mask, 1.25)
    func = aten.native_dropout_backward.default
    assert ours(func, *args) in (NotImplemented, torchs(func, *args))


@settings(max_examples=50, deadline=None)
@given(shape=solid_shapes, dtype=floats)
def test_gradient_of_elu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The gradient of a contiguous ELU is laid out as torch says."""
    x = meta(*shape, dtype=dtype)
    agrees(aten.elu_backward.default, x, 1.0, 1.0, 1.0, True, x)


# ---- norms and sampling


@settings(max_examples=200, deadline=None)
@given(
    shape=st.lists(sizes, min_size=1, max_size=4).map(tuple), groups=st.integers(0, 3),
    kinds=st.tuples(st.none() | floats, floats), dtype=dtypes, data=st.data(),
    mask=st.lists(st.booleans(), min_size=3, max_size=3),
)  # fmt: skip
def test_group_norm(
    shape: tuple[int, ...], groups: int, kinds: tuple[torch.dtype | None, torch.dtype], dtype: torch.dtype,
    data: st.DataObject, mask: list[bool],
) -> None:  # fmt: skip
    """Group norm and its gradients answer as torch's meta kernels, or not at all."""
    x, grad = data.draw(laid_out(shape, dtype)), data.draw(laid_out(shape, dtype))
    channels = shape[1] if len(shape) > 1 else 1
    weight = None if kinds[0] is None else meta(channels, dtype=data.draw(st.just(dtype) | st.just(kinds[0])))
    sizes = shape[0], channels, x[0, 0].numel() if x.dim() > 1 and x.numel() else 1
    args = (x, weight, weight, *sizes, groups, 1e-5)
    assert ours(aten.native_group_norm.default, *args) in (
        NotImplemented,
        torchs(aten.native_group_norm.default, *args),
    )
    figures = meta(shape[0], groups, dtype=data.draw(st.just(dtype) | st.just(kinds[1])))
    args = (grad, x, figures, figures, weight, *sizes, groups, mask)
    assert ours(aten.native_group_norm_backward.default, *args) in (
        NotImplemented,
        torchs(aten.native_group_norm_backward.default, *args),
    )


def test_group_norm_with_parameters_of_its_dtype_is_covered() -> None:
    """In half precision as well, where the statistics have the dtype of the input."""
    x, weight = meta(2, 6, 4, 4, dtype=torch.bfloat16), meta(6, dtype=torch.bfloat16)
    y = ((2, 6, 4, 4), (96, 16, 4, 1), torch.bfloat16, 384)
    figure = ((2, 3), (3, 1), torch.bfloat16, 12)
    assert ours(aten.native_group_norm.default, x, weight, weight, 2, 6, 16, 3, 1e-5) == (y, figure, figure)


@pytest.mark.parametrize(
    ("func", "rank"), [(aten.upsample_bilinear2d.default, 2), (aten.upsample_trilinear3d.default, 3)], ids=str
)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_upsampling(func: Any, rank: int, data: st.DataObject) -> None:
    """Interpolation answers as torch's meta kernel, or not at all."""
    shape = tuple(data.draw(st.lists(sizes, min_size=rank + 1, max_size=rank + 2)))
    x = data.draw(laid_out(shape, data.draw(floats)))
    size = data.draw(st.lists(st.integers(0, 5), min_size=rank, max_size=rank))
    assert ours(func, x, size, True) in (NotImplemented, torchs(func, x, size, True))


@settings(max_examples=100, deadline=None)
@given(shape=st.lists(sizes, min_size=1, max_size=4).map(tuple), dtype=floats, data=st.data())
def test_batch_norm_without_parameters(
    shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    """The gradient of instance norm answers as torch's meta kernel, or not at all."""
    x, grad = data.draw(laid_out(shape, dtype)), data.draw(laid_out(shape, dtype))
    saved = meta(*shape[1:2])
    args = (grad, x, None, None, None, saved, saved, True, 1e-5, [True, False, False])
    func = aten.native_batch_norm_backward.default
    assert ours(func, *args) in (NotImplemented, torchs(func, *args))


# ---- kernels that CUDA lays out otherwise: as torch for contiguous inputs, by their own rule for others


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A contiguous tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor in the channels-last format."""
    return meta(*shape, dtype=dtype).to(memory_format=torch.channels_last)


def agrees(func: Any, *args: Any) -> None:
    """The shortcut answers, and as torch's meta kernel does."""
    assert ours(func, *args) == torchs(func, *args) != RAISES


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (2, 5, 3), (1, 1), (4, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("last", [1, 2])
def test_layer_norm_of_contiguous_inputs(dtype: torch.dtype, shape: tuple[int, ...], last: int) -> None:
    """Layer norm of a contiguous tensor and its gradients are as torch says, statistics included."""
    x, weight = meta(*shape, dtype=dtype), meta(*shape[-last:], dtype=dtype)
    agrees(aten.native_layer_norm.default, x, shape[-last:], weight, weight, 1e-5)
    agrees(aten.native_layer_norm.default, x, shape[-last:], weight, None, 1e-5)
    agrees(aten.native_layer_norm.default, x, shape[-last:], None, None, 1e-5)
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    mean = meta(*shape[:-last], *[1] * last, dtype=kind)
    for mask in ([True] * 3, [True, False, False], [False, True, True]):
        agrees(aten.native_layer_norm_backward.default, x, x, shape[-last:], mean, mean, weight, weight, mask)


def test_layer_norm_of_other_layouts() -> None:
    """CUDA's layer norm answers contiguous even where the input is transposed or a slice."""
    weight = meta(4)
    for x in (meta(3, 2, 4).transpose(0, 1), meta(2, 4, 3).transpose(1, 2), meta(2, 6, 4)[:, :3]):
        statistics = ((2, 3, 1), (3, 1, 1), torch.float32, 24)
        expected = ((2, 3, 4), (12, 4, 1), torch.float32, 96), statistics, statistics
        assert ours(aten.native_layer_norm.default, x, [4], weight, weight, 1e-5) == expected
        agrees(aten.native_layer_norm.default, x, [4], weight, weight, 1e-5)
        mean = meta(2, 3, 1)
        assert ours(
            aten.native_layer_norm_backward.default, x, x, [4], mean, mean, weight, weight, [True] * 3
        ) == (
            ((2, 3, 4), (12, 4, 1), torch.float32, 96),
            ((4,), (1,), torch.float32, 16),
            ((4,), (1,), torch.float32, 16),
        )


@pytest.mark.parametrize(
    "args",
    [
        (meta(2, 3), [4], None, None, 1e-5),
        (meta(2, 3), [], None, None, 1e-5),
        (meta(2, 3), [2, 2, 3], None, None, 1e-5),
        (meta(2, 3), [3], meta(4), None, 1e-5),
        (meta(2, 3), [3], None, meta(1, 3), 1e-5),
        (meta(2, 3, dtype=torch.int64), [3], None, None, 1e-5),
        (meta(2, 3, dtype=torch.float16), [3], meta(3), meta(3), 1e-5),
        (torch.empty(2, 3), [3], torch.empty(3), torch.empty(3), 1e-5),
    ],
)
def test_layer_norm_leaves_errors_to_torch(args: tuple[Any, ...]) -> None:
    """Layer norm over shapes or dtypes that do not fit is torch's own to judge."""
    assert ours(aten.native_layer_norm.default, *args) is NotImplemented


PAIRS = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.float16, torch.float32),
]  # input and parameters


@pytest.mark.parametrize(("dtype", "kind"), PAIRS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6), (2, 1, 1, 1)], ids=str)
def test_batch_norm_of_contiguous_inputs(
    dtype: torch.dtype, kind: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Batch norm in training and its gradients are as torch says."""
    x, weight = meta(*shape, dtype=dtype), meta(shape[1], dtype=kind)
    for statistics in ((weight, weight), (None, None)):
        agrees(aten.native_batch_norm.default, x, weight, weight, *statistics, True, 0.1, 1e-5)
    saved = (weight, weight, weight, weight)
    backward = (aten.native_batch_norm_backward.default, x, x, weight, *saved, True, 1e-5)
    agrees(*backward, [True, True, True])
    if len(shape) > 2:  # cuDNN makes all gradients, whatever is asked for
        assert ours(*backward, [False, True, False]) == ours(*backward, [True, True, True])


def test_batch_norm_that_cudnn_does_not_take() -> None:
    """bfloat16, two dimensions or no parameters: the native kernel keeps statistics in evaluation as well."""
    weight = meta(3)
    kept = ((3,), (1,), torch.float32, 12)
    for x, scale in (
        (meta(2, 3), weight),
        (meta(2, 3, 4, 5, dtype=torch.bfloat16), weight),
        (meta(2, 3, 4, 5), None),
    ):
        for training in (True, False):
            args = (x, scale, scale, weight, weight, training, 0.1, 1e-5)
            agrees(aten.native_batch_norm.default, *args)
            assert ours(aten.native_batch_norm.default, *args)[1:] == (kept, kept)


def test_batch_norm_in_evaluation_saves_nothing() -> None:
    """cuDNN returns no statistics in evaluation, and keeps the input's format."""
    weight = meta(3)
    nothing = ((0,), (1,), torch.float32, 0)
    assert ours(
        aten.native_batch_norm.default, meta(2, 3, 4, 5), weight, weight, weight, weight, False, 0.1, 1e-5
    ) == (((2, 3, 4, 5), (60, 20, 5, 1), torch.float32, 480), nothing, nothing)
    assert ours(
        aten.native_batch_norm.default, image(2, 3, 4, 5), weight, weight, weight, weight, False, 0.1, 1e-5
    ) == (((2, 3, 4, 5), (60, 1, 15, 3), torch.float32, 480), nothing, nothing)


def test_batch_norm_leaves_the_rest_to_torch() -> None:
    """Batch norm over a slice, without statistics, or with parameters of another size is torch's own."""
    weight = meta(3)
    for args in (
        (meta(2, 6, 4)[:, :3], weight, weight, weight, weight, True, 0.1, 1e-5),
        (meta(2, 4, 4), weight, weight, weight, weight, True, 0.1, 1e-5),
        (meta(2, 3, 4), weight, weight, None, None, False, 0.1, 1e-5),
    ):
        assert ours(aten.native_batch_norm.default, *args) is NotImplemented


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of a convolution over contiguous tensors, most of which fit together."""
    spatial = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    groups = draw(st.integers(1, 3))
    per_group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    channels = per_group[0] * groups + (draw(st.integers(0, 9)) == 0)
    kernel = [draw(st.integers(1, 3)) for _ in range(spatial)]
    outer = (per_group[0] * groups, per_group[1]) if transposed else (per_group[1] * groups, per_group[0])
    weight = meta(*outer, *kernel)
    x = meta(draw(st.integers(1, 3)), channels, *(draw(st.integers(1, 7)) for _ in range(spatial)))
    bias = draw(st.sampled_from((None, meta(per_group[1] * groups))))

    def each(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(spatial)]

    extra = each(0, 1) if transposed else [0] * spatial
    return x, weight, bias, each(1, 3), each(0, 2), each(1, 2), transposed, extra, groups


@settings(max_examples=500, deadline=None)
@given(args=convolutions())
def test_convolution_of_contiguous_inputs(args: tuple[Any, ...]) -> None:
    """A convolution of contiguous tensors is as torch says; where torch raises, the shortcut stays silent."""
    answer = ours(aten.convolution.default, *args)
    assert answer in (NotImplemented, torchs(aten.convolution.default, *args))


@settings(max_examples=300, deadline=None)
@given(args=convolutions(), mask=st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_convolution_backward_of_contiguous_inputs(args: tuple[Any, ...], mask: tuple[bool, ...]) -> None:
    """The gradients of a convolution of contiguous tensors are as torch says."""
    x, weight, _, *rest = args
    out = ours(aten.convolution.default, *args)
    assume(out is not NotImplemented)
    agrees(aten.convolution_backward.default, meta(*out[0]), x, weight, [out[0][1]], *rest, list(mask))


CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize(
    ("x", "weight", "strides"),
    [
        (image(2, 3, 6, 5), meta(4, 3, 1, 1), (120, 1, 20, 4)),  # the input decides
        (meta(2, 3, 6, 5), image(4, 3, 1, 1), (120, 1, 20, 4)),  # or the weight
        (meta(2, 3, 6, 5), meta(4, 3, 1, 1), (120, 30, 5, 1)),
        (meta(2, 6, 5, 3).permute(0, 3, 1, 2), meta(4, 3, 1, 1), (120, 1, 20, 4)),
        (meta(2, 6, 6, 5)[:, :3], meta(4, 3, 1, 1), (120, 30, 5, 1)),  # a slice is copied
        (meta(2, 3, 5, 6).transpose(2, 3), meta(4, 3, 1, 1), (120, 30, 5, 1)),
    ],
)
def test_convolution_of_other_layouts(x: Tensor, weight: Tensor, strides: tuple[int, ...]) -> None:
    """cuDNN's convolution answers channels last if the input or the weight is, and contiguous otherwise."""
    assert ours(aten.convolution.default, x, weight, None, *CONV) == (
        (2, 4, 6, 5), strides, torch.float32, 960,
    )  # fmt: skip


def test_convolution_formats() -> None:
    """Three dimensions have a format of their own, double precision and one dimension have none."""
    volume = meta(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    cube = ([1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)
    assert ours(aten.convolution.default, volume, meta(1, 3, 1, 1, 1), None, *cube) == (
        (2, 1, 4, 5, 6), (120, 1, 30, 6, 1), torch.float32, 960,
    )  # fmt: skip
    doubles = image(2, 3, 6, 5, dtype=torch.float64), meta(4, 3, 1, 1, dtype=torch.float64)
    assert ours(aten.convolution.default, *doubles, None, *CONV) == (
        (2, 4, 6, 5), (120, 30, 5, 1), torch.float64, 1920,
    )  # fmt: skip
    line = ([1], [0], [1], False, [0], 1)
    assert ours(aten.convolution.default, meta(2, 5, 3).transpose(1, 2), meta(4, 3, 1), None, *line) == (
        (2, 4, 5), (20, 5, 1), torch.float32, 160,
    )  # fmt: skip


def test_convolution_backward_of_other_layouts() -> None:
    """Both gradients have the format of the input or the weight, whatever that of the outer gradient."""
    for grad in (meta(2, 4, 6, 5), image(2, 4, 6, 5)):
        assert ours(
            aten.convolution_backward.default,
            grad, image(2, 3, 6, 5), meta(4, 3, 1, 1), [4], *CONV, [True] * 3,
        ) == (
            ((2, 3, 6, 5), (90, 1, 15, 3), torch.float32, 720),
            ((4, 3, 1, 1), (3, 1, 3, 3), torch.float32, 48),
            ((4,), (1,), torch.float32, 16),
        )  # fmt: skip
        assert ours(
            aten.convolution_backward.default,
            grad, meta(2, 3, 6, 5), meta(4, 3, 1, 1), [4], *CONV, [True] * 3,
        ) == (
            ((2, 3, 6, 5), (90, 30, 5, 1), torch.float32, 720),
            ((4, 3, 1, 1), (3, 1, 1, 1), torch.float32, 48),
            ((4,), (1,), torch.float32, 16),
        )  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        (meta(2, 3, 6, 5), meta(4, 2, 1, 1), None, *CONV),  # channels
        (meta(2, 3, 1, 1), meta(4, 3, 3, 3), None, *CONV),  # the kernel is larger than the image
        (meta(2, 3, 6, 5), meta(4, 3, 1), None, *CONV),  # ranks
        (meta(2, 3, 6, 5), meta(4, 3, 1, 1, dtype=torch.float16), None, *CONV),  # dtypes
        (meta(2, 3, 6, 5), meta(4, 3, 1, 1), meta(3), *CONV),  # bias
        (meta(0, 3, 6, 5), meta(4, 3, 1, 1), None, *CONV),
        (torch.empty(2, 3, 6, 5), torch.empty(4, 3, 1, 1), None, *CONV),
    ],
)
def test_convolution_leaves_errors_to_torch(args: tuple[Any, ...]) -> None:
    """A convolution of tensors that do not fit together is torch's own to judge."""
    assert ours(aten.convolution.default, *args) is NotImplemented


@pytest.mark.parametrize(
    ("shifts", "dims"), [([1], [0]), ([1, 2], [0, 1]), ([-1, 7], [-1, 1]), ([0, 0, 3], [0, 1, 2])]
)
def test_roll(shifts: list[int], dims: list[int]) -> None:
    """A roll is as torch says for contiguous tensors, and contiguous for others."""
    agrees(aten.roll.default, meta(2, 3, 4), shifts, dims)
    for x in (meta(4, 3, 2).permute(2, 1, 0), meta(2, 3, 8)[..., ::2], meta(1, 3, 4).expand(2, 3, 4)):
        assert ours(aten.roll.default, x, shifts, dims) == ((2, 3, 4), (12, 4, 1), torch.float32, 96)
    assert ours(aten.roll.default, meta(2, 3, 4), [1]) is NotImplemented
    assert ours(aten.roll.default, meta(2, 3, 4), [1, 2], [0]) is NotImplemented
    assert ours(aten.roll.default, meta(2, 3, 4), [1], [3]) is NotImplemented


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_softmax_backward(dtype: torch.dtype) -> None:
    """The gradient of a softmax is as torch says for contiguous tensors, and contiguous for others."""
    x = meta(2, 3, 4, dtype=dtype)
    agrees(aten._softmax_backward_data.default, x, x, -1, dtype)
    transposed = meta(2, 4, 3, dtype=dtype).transpose(1, 2)
    assert ours(aten._softmax_backward_data.default, transposed, x, -1, dtype) == layout(x)
    assert ours(aten._softmax_backward_data.default, x, x, 3, dtype) is NotImplemented
    assert ours(aten._softmax_backward_data.default, x, x[:1], -1, dtype) is NotImplemented


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_masked_fill(dtype: torch.dtype) -> None:
    """A filled copy is as torch says for contiguous tensors, and contiguous for others."""
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
    (aten.cat.default, ([image(2, 3, 4, 5), image(2, 3, 4, 5)], 1)),
    (aten.cat.default, ([image(2, 3, 4, 5), image(2, 6, 4, 5)[:, :3]], 1)),
    # dtypes that are promoted, and those that are refused
    (aten.cat.default, ([meta(2, 3), meta(2, 3, dtype=torch.float64)], 1)),
    (aten.add.Tensor, (meta(2, 3), meta(3, dtype=torch.float64))),
    (aten.mm.default, (meta(2, 3), meta(3, 4, dtype=torch.float64))),
    # shapes that do not fit, and the empty tensor that `cat` passes over
    (aten.cat.default, ([meta(2, 3), meta(3, 3)], 1)),
    (aten.cat.default, ([meta(2, 3), meta(0)], 1)),
    (aten.add.Tensor, (meta(2, 3), meta(2))),
    (aten.add_.Tensor, (meta(3), meta(2, 3))),
    (aten.sum.dim_IntList, (meta(2, 3), [0, -2])),
]


@pytest.mark.parametrize(("func", "args"), AWKWARD, ids=[str(func) for func, _ in AWKWARD])
def test_awkward_cases(func: Any, args: tuple[Any, ...]) -> None:
    """Where torch's kernels have ways of their own, the shortcut follows them or stays silent."""
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
    (aten.add_.Tensor, (meta(dtype=torch.int64), 1), ((), (), torch.int64, 8)),
    (
        aten.sum.dim_IntList,
        (image(2, 3, 4, 5), [0, 2, 3], True),
        ((1, 3, 1, 1), (3, 1, 1, 1), torch.float32, 12),
    ),
    (aten.mean.dim, (meta(2, 3, 4, 5), [-1, -2], True), ((2, 3, 1, 1), (3, 1, 1, 1), torch.float32, 24)),
    (aten.cat.default, ([meta(2, 3), meta(2, 1)], 1), ((2, 4), (4, 1), torch.float32, 32)),
    (aten.cat.default, ([meta(2, 3, 4, 5), SLICE], 1), ((2, 6, 4, 5), (120, 20, 5, 1), torch.float32, 960)),
    (aten.cat.default, ([meta(0), meta(2, 3)], -2), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.cat.default, ([image(2, 3, 4, 5)] * 2, 1), ((2, 6, 4, 5), (120, 1, 30, 6), torch.float32, 960)),
    (aten.stack.default, ([meta(2, 3)] * 4, 1), ((2, 4, 3), (12, 3, 1), torch.float32, 96)),
    (aten.pow.Tensor_Scalar, (meta(2, 3), 3.0), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.mul.Tensor, (HALF, meta(1, 3)), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.mul.Tensor, (HALF, meta()), ((2, 3), (3, 1), torch.bfloat16, 12)),
    (aten._softmax.default, (meta(2, 3), -1, False), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.clone.default, (image(2, 3, 4, 5),), ((2, 3, 4, 5), (60, 1, 15, 3), torch.float32, 480)),
    (aten._to_copy.default, (HALF,), ((2, 3), (3, 1), torch.bfloat16, 12)),
    (aten.zeros_like.default, (meta(),), ((), (), torch.float32, 4)),
    (aten.native_dropout_backward.default, (meta(2), MASK, 2.0), ((2,), (1,), torch.float32, 8)),
    (aten.upsample_bilinear2d.default, (meta(1, 2, 3, 4), [6, 5], False),
     ((1, 2, 6, 5), (60, 30, 5, 1), torch.float32, 240)),
    (aten.mm.default, (meta(2, 3), meta(4, 3).t()), ((2, 4), (4, 1), torch.float32, 32)),
    (aten.bmm.default, (meta(5, 2, 3), meta(5, 4, 3).mT), ((5, 2, 4), (8, 4, 1), torch.float32, 160)),
    (aten.addmm.default, (meta(4), meta(2, 3), meta(4, 3).t()), ((2, 4), (4, 1), torch.float32, 32)),
]  # fmt: skip


@pytest.mark.parametrize(("func", "args", "expected"), COVERED, ids=[str(case[0]) for case in COVERED])
def test_frequent_cases_are_covered(func: Any, args: tuple[Any, ...], expected: Layout) -> None:
    """The cases that models are made of are answered, and as torch answers them."""
    assert ours(func, *args) == expected == torchs(func, *args)


def test_every_shortcut_is_held_against_torch() -> None:
    """No shortcut is left out of the tests above."""
    tested = {
        *UNARY, *IN_PLACE, *WITH_NUMBER, *BINARY, *(func for func, _ in DERIVATIVES), *KERNELS,
        aten.threshold_backward.default, aten.where.self, aten.clamp.default, aten.sum.dim_IntList,
        aten.mean.dim, aten.linalg_vector_norm.default, aten.mm.default, aten.bmm.default,
        aten.addmm.default, aten.cat.default, aten.select_backward.default, aten.slice_backward.default,
        aten._log_softmax.default, aten._log_softmax_backward_data.default, aten.nll_loss_forward.default,
        aten.nll_loss_backward.default, aten.native_dropout.default, aten.native_dropout_backward.default,
        aten.elu_backward.default, aten.leaky_relu_backward.default, aten.clamp_.default, aten.lerp_.Scalar,
        aten.addcmul_.default, aten.addcdiv_.default, *(func for func, _, _ in FOREACH),
        aten._foreach_div_.ScalarList, aten._foreach_addcdiv_.ScalarList, aten._foreach_mul_.Tensor,
        *LIKES, aten.clone.default, aten.full_like.default, *FACTORIES, aten.full.default,
        aten.scalar_tensor.default, aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default,
        aten.stack.default, aten._softmax.default, aten.native_group_norm.default,
        aten.native_group_norm_backward.default, aten.upsample_bilinear2d.default,
        aten.upsample_trilinear3d.default,
    }  # fmt: skip
    fused = {aten._fused_sgd_.default, aten._fused_adagrad_.default}  # torch has no meta kernel for them
    assert set(META_KERNELS) == tested | fused | set(rnn.KERNELS)  # those of recurrent layers: test_rnn.py


def test_products_of_groups() -> None:
    """As torch says in bfloat16; alike in float32, which its meta kernel refuses. Rows are padded."""
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
    """The result is contiguous, and the figure in single precision; gradients as they are asked for."""
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
    """The scalar's storage holds a loss for every element; without reduction torch's own kernel answers."""
    x = meta(3, 4)
    assert ours(aten.binary_cross_entropy.default, x, x) == ((), (), torch.float32, 48)
    assert ours(aten.binary_cross_entropy.default, x, x, None, 0) is NotImplemented
