"""Kernels in place of torch's on meta: they give what torch's give, or what CUDA's kernels do."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

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
    aten.div.Tensor, aten.rsub.Scalar, aten.pow.Tensor_Scalar, aten.leaky_relu.default,
]  # fmt: skip
BINARY = [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor]


@pytest.mark.parametrize("func", UNARY, ids=str)
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


@pytest.mark.parametrize("exponent", [0.5, 1, 1.0, 2, 2.0, 3, -1, 1.5])
@settings(max_examples=60, deadline=None)
@given(tensors=operands(1))
def test_powers(exponent: float, tensors: list[Tensor]) -> None:
    """Each power answers as torch's meta kernel, which takes another way for some of them, or not at all."""
    func = aten.pow.Tensor_Scalar
    assert ours(func, *tensors, exponent) in (NotImplemented, torchs(func, *tensors, exponent))


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


@settings(max_examples=50, deadline=None)
@given(shape=solid_shapes, dtype=floats)
def test_gradient_of_elu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The gradient of a contiguous ELU is laid out as torch says."""
    x = meta(*shape, dtype=dtype)
    agrees(aten.elu_backward.default, x, 1.0, 1.0, 1.0, True, x)


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
    # dtypes that are promoted, and those that are refused
    (aten.add.Tensor, (meta(2, 3), meta(3, dtype=torch.float64))),
    # shapes that do not fit, and the empty tensor that `cat` passes over
    (aten.add.Tensor, (meta(2, 3), meta(2))),
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
    (aten.pow.Tensor_Scalar, (meta(2, 3), 3.0), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.mul.Tensor, (HALF, meta(1, 3)), ((2, 3), (3, 1), torch.float32, 24)),
    (aten.mul.Tensor, (HALF, meta()), ((2, 3), (3, 1), torch.bfloat16, 12)),
]  # fmt: skip


@pytest.mark.parametrize(("func", "args", "expected"), COVERED, ids=[str(case[0]) for case in COVERED])
def test_frequent_cases_are_covered(func: Any, args: tuple[Any, ...], expected: Layout) -> None:
    """The cases that models are made of are answered, and as torch answers them."""
    assert ours(func, *args) == expected == torchs(func, *args)


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
