"""CUDA's autocast on meta: which operators are cast to what, and how long casts of weights live."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.cuda.autocast import mode as lists
from planner.capture.cuda.operators.semantics import cuda_semantics
from planner.errors import ModelError
from planner.jobs import Loss, Mode, Precision
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Trace
from tests.helpers.models import AMPERE, born, job_of, trace_of

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@contextmanager
def region(dtype: torch.dtype = HALF) -> Iterator[None]:
    with cuda_semantics(AMPERE), torch.autocast("cuda", dtype=dtype):
        yield


def empty(*shape: int, dtype: torch.dtype = SINGLE, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that run below autograd, with the types of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) else out
        name = func._schema.name.removeprefix("aten::")
        if isinstance(first, Tensor) and name != "detach":  # which autograd adds where it saves a result
            self.seen.append((name, first.dtype))
        return out


# ---- the lists


def macro(name: str) -> set[str]:
    """The operators of a macro of the installed header, as `name` or `name.overload`."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    lines = re.search(rf"#define {name}\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    assert lines is not None
    entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", lines.group(1))
    return {f"{op}.{overload}" if overload else op for op, overload in entries}


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        (lists.LOWER_PRECISION, "LOWER_PRECISION_FP", {"cudnn_convolution", "cudnn_convolution_transpose"}),
        (lists.FLOAT32, "FP32", set()),
        (lists.FLOAT32_BY_DTYPE, "FP32_SET_OPT_DTYPE", set()),
        (lists.WIDEST, "PROMOTE", set()),
    ],
)
def test_lists_are_those_of_the_installed_torch(ours: str, theirs: str, more: set[str]) -> None:
    """Each list is the macro of ATen/autocast_mode.h, with what CUDA adds to it in autocast_mode.cpp."""
    names = ours.split()
    assert len(names) == len(set(names))
    assert set(names) == macro(f"AT_FORALL_{theirs}") | more


def test_no_operator_of_autocast_is_forgotten() -> None:
    """Each operator of CUDA's autocast in aten is in one of the lists, and no other operator is."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    theirs = {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}
    assert theirs - {"_cudnn_rnn"} == {  # that one is in builds with cuDNN, and has a module of its own
        *lists.LOWER_PRECISION.split(), *lists.FLOAT32.split(), *lists.FLOAT32_BY_DTYPE.split(),
        *lists.FLOAT32_BY_OVERLOAD, *lists.WIDEST.split(), *lists.BANNED,
    }  # fmt: skip


# ---- types


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x, h: F.linear(x, empty(3, 8), empty(3)), HALF),
        (lambda x, h: x @ h, HALF),
        (lambda x, h: torch.einsum("ij,jk->ik", x, h), HALF),
        (lambda x, h: torch.bmm(x[None], h[None]), HALF),
        (lambda x, h: F.conv2d(x[None, None], empty(5, 1, 3, 3), empty(5)), HALF),
        (lambda x, h: F.conv2d(x[None, None], empty(5, 1, 3, 3), padding="same"), HALF),
        (lambda x, h: F.conv_transpose2d(x[None, None], empty(1, 5, 2, 2)), HALF),
        (lambda x, h: F.prelu(x, empty(1)), HALF),
        (lambda x, h: F.scaled_dot_product_attention(x[None, None], h[None, None], x[None, None]), HALF),
        (lambda x, h: F.softmax(h, -1), SINGLE),
        (lambda x, h: F.softmax(h, -1, dtype=HALF), HALF),  # the caller's dtype counts
        (lambda x, h: F.log_softmax(h, -1), SINGLE),
        (lambda x, h: F.layer_norm(h, (8,), empty(8), empty(8)), SINGLE),
        (lambda x, h: F.group_norm(h[None], 2), SINGLE),
        (lambda x, h: F.cross_entropy(h, torch.empty(8, dtype=torch.long, device="meta")), SINGLE),
        (lambda x, h: F.mse_loss(h, h), SINGLE),
        (lambda x, h: F.binary_cross_entropy_with_logits(h, h), SINGLE),
        (lambda x, h: F.interpolate(h[None, None], scale_factor=2, mode="bilinear"), SINGLE),
        (lambda x, h: h.sum(), SINGLE),
        (lambda x, h: h.sum(0, dtype=HALF), HALF),
        (lambda x, h: h.cumsum(0), SINGLE),
        (lambda x, h: h.norm(), SINGLE),
        (lambda x, h: h.norm(2, 0), SINGLE),
        (lambda x, h: h.norm(dim=1, keepdim=True), SINGLE),
        (lambda x, h: h**2, SINGLE),
        (lambda x, h: h.exp(), SINGLE),
        (lambda x, h: h.mean(), HALF),  # in no list: the type stays
        (lambda x, h: F.gelu(h), HALF),
        (lambda x, h: F.batch_norm(h, empty(8), empty(8), empty(8), empty(8), training=True), HALF),
        (lambda x, h: F.max_pool2d(h[None], 2), HALF),
        (lambda x, h: x + h, SINGLE),  # torch's own promotion
        (lambda x, h: torch.cat([x, h]), SINGLE),
        (lambda x, h: torch.stack([h, h]), HALF),
        (lambda x, h: torch.atan2(x, h), SINGLE),
        (lambda x, h: torch.addcmul(h, h, x), SINGLE),
        (lambda x, h: torch.addcmul(h, h, h), HALF),
        (lambda x, h: torch.dot(x[0], h[0]), SINGLE),
        (lambda x, h: F.linear(x.double(), empty(3, 8, dtype=DOUBLE)), DOUBLE),  # doubles are left alone
        (lambda x, h: x.double().sum(), DOUBLE),
        (lambda x, h: torch.ones(3, dtype=torch.int64, device="meta").sum(), torch.int64),
    ],
)
def test_types_of_results(run: Callable[[Tensor, Tensor], Tensor], expected: torch.dtype) -> None:
    """Return what autocast's lists make of a tensor of 32 bits `x` and one of 16 bits `h`."""
    with region():
        assert run(empty(8, 8), empty(8, 8, dtype=HALF)).dtype is expected


def test_the_region_names_the_lower_type() -> None:
    """With bfloat16, products are bfloat16; a tensor of the other 16-bit type has no widest type with it."""
    with region(BRAIN):
        assert (empty(2, 2) @ empty(2, 2, dtype=HALF)).dtype is BRAIN
        with pytest.raises(RuntimeError, match="autocast to torch.bfloat16 meets tensors of another type"):
            torch.atan2(empty(2, dtype=HALF), empty(2, dtype=BRAIN))


def test_batch_norm_keeps_its_statistics_in_single_precision() -> None:
    """A 16-bit input, parameters of 32 bits: the saved mean and deviation have 32."""
    with region():
        h = empty(4, 8, 2, 2, dtype=HALF)
        saved = torch.ops.aten.native_batch_norm(h, *[empty(8) for _ in range(4)], True, 0.1, 1e-5)
    assert [t.dtype for t in saved] == [HALF, SINGLE, SINGLE]


def test_autocast_ends_at_the_outermost_listed_operator() -> None:
    """`tensordot` takes the widest type; the product inside, which alone would be cast down, keeps it."""
    with region(), Log() as log:
        torch.tensordot(empty(4, 4), empty(4, 4, dtype=HALF), dims=1)
    assert dict(log.seen)["mm"] is SINGLE


@pytest.mark.parametrize(
    ("dtype", "ops"),
    [
        (HALF, [("_softmax", SINGLE)]),  # one kernel reads 16 bits and writes 32
        (BRAIN, [("_to_copy", SINGLE), ("_softmax", SINGLE)]),
    ],
)
def test_softmax_of_float16_makes_no_copy(dtype: torch.dtype, ops: list[tuple[str, torch.dtype]]) -> None:
    """The fused conversion of ATen/native/SoftMax.cpp is for float16 alone; its gradient has 16 bits."""
    with region(dtype):
        h = empty(3, 5, dtype=dtype, grad=True)
        with Log() as log:
            out = F.softmax(h, -1)
        assert log.seen == ops
        out.backward(torch.empty_like(out))  # type: ignore[no-untyped-call]
    assert h.grad is not None
    assert h.grad.dtype is dtype


def test_binary_cross_entropy_is_refused() -> None:
    """The refusal is that of CUDA; the message states what to use."""
    with region(), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(empty(3), empty(3))


def test_without_a_region_nothing_is_cast() -> None:
    """Inside the semantics but outside of a region, as in a job of single precision."""
    with cuda_semantics(AMPERE):
        assert (empty(2, 2) @ empty(2, 2)).dtype is SINGLE
        with torch.autocast("cuda"):
            pass
        assert (empty(2, 2) @ empty(2, 2)).dtype is SINGLE


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_models_switch_autocast_off_and_query_it(device: str) -> None:
    """A region inside the region counts, whether it names cuda or the device of its tensors."""
    with region(BRAIN):
        assert torch.is_autocast_enabled(device)
        assert torch.get_autocast_dtype(device) is BRAIN
        assert torch.amp.is_autocast_available(device)
        with torch.autocast(device_type=device, enabled=False):
            assert not torch.is_autocast_enabled(device)
            assert (empty(2, 2) @ empty(2, 2)).dtype is SINGLE
        with torch.autocast(device, dtype=HALF):
            assert (empty(2, 2) @ empty(2, 2)).dtype is HALF
        assert (empty(2, 2) @ empty(2, 2)).dtype is BRAIN


def test_nothing_of_it_is_left() -> None:
    """Afterwards torch's kernels, questions and thread state are its own, even where the region fails."""
    query = torch.is_autocast_enabled
    before = torch._C._dispatch_dump("aten::mm")
    with pytest.raises(ZeroDivisionError), region():
        assert torch._C._dispatch_dump("aten::mm") != before
        raise ZeroDivisionError
    assert torch._C._dispatch_dump("aten::mm") == before
    assert torch.is_autocast_enabled is query
    assert not torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert (empty(2, 2) @ empty(2, 2)).dtype is SINGLE  # torch's own kernel passes over meta
    finally:
        torch.set_autocast_enabled("cuda", False)


# ---- the backward pass


def test_the_backward_pass_takes_over_the_state_of_its_caller() -> None:
    """Inside the region the sum of a bias's gradient is in float32; outside it is in float16."""
    seen = {}
    with cuda_semantics(AMPERE):
        for inside in (True, False):
            layer = nn.Linear(4, 3, device="meta")
            with torch.autocast("cuda"):
                loss = layer(empty(2, 4)).float().sum()
                if inside:
                    with Log() as log:
                        loss.backward()
            if not inside:
                with Log() as log:
                    loss.backward()
            seen[inside] = dict(log.seen)["sum"]
            assert layer.weight.grad is not None
            assert layer.weight.grad.dtype is SINGLE
    assert seen == {True: SINGLE, False: HALF}


# ---- casts of weights


class Twice(nn.Module):
    """One layer, applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.layer(x))
        return out


def copies(trace: Trace, size: int) -> list[tuple[Phase, Phase | None]]:
    """The phases in which each cast of this many bytes is born and dies; None where it never dies."""
    phase = Phase.SETUP
    births: dict[int, Phase] = {}
    deaths: dict[int, Phase] = {}
    for event in trace.events:
        if isinstance(event, PhaseStart):
            phase = event.phase
        elif isinstance(event, Free):
            deaths[event.block] = phase
        elif event.size_bytes == size and "_to_copy" in trace.sites[event.site].op:
            births[event.block] = phase
    return [(born, deaths.get(block)) for block, born in births.items()]


def test_a_weight_is_cast_once_a_region() -> None:
    """A layer that is applied twice has one cast; autograd holds it until the backward pass is done.

    Its gradient of 16 bits is cast back to the weight's type, and lives on as the gradient.
    """
    job = job_of("10", mode=Mode.TRAIN, precision=Precision.AMP_FP16)
    trace = trace_of(Twice, job, 3)
    assert copies(trace, 200) == [(Phase.FORWARD, Phase.BACKWARD)]
    assert copies(trace, 400) == [(Phase.BACKWARD, None)]


def test_casts_that_nobody_else_holds_end_with_the_region() -> None:
    """In inference a cast lives from its first use to the end of the region: not until the next batch."""
    job = job_of("10", mode=Mode.INFER, steps=2, precision=Precision.AMP_BF16)
    trace = trace_of(Twice, job, 3)
    assert copies(trace, 200) == [(Phase.FORWARD, Phase.FORWARD)] * 2
    cast = [e.block for e in trace.events if isinstance(e, Alloc) and e.size_bytes == 200]
    products = [e.block for e in trace.events if isinstance(e, Alloc) and e.size_bytes == 3 * 10 * 2]
    order = [e.block for e in trace.events if isinstance(e, Free)]
    assert order.index(cast[0]) > order.index(products[1])  # the first product goes before the cast


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: empty(10, 10),  # needs no gradient
        lambda: empty(10, 10, grad=True) * 1,  # no leaf
        lambda: empty(20, 10, grad=True).detach().requires_grad_()[:10],  # a view
        lambda: empty(10, 10, dtype=BRAIN, grad=True),  # of 16 bits already, if of others
    ],
)
def test_only_weights_are_kept(tensor: Callable[[], Tensor]) -> None:
    """Casts of other tensors than leaves of single precision that need a gradient are repeated each time."""
    with region():
        weight = tensor()
        with Log() as log:
            F.linear(empty(3, 10, dtype=HALF), weight)
            F.linear(empty(3, 10, dtype=HALF), weight)
    assert [op for op, _ in log.seen].count("_to_copy") == 2


def test_the_cache_can_be_switched_off() -> None:
    """`cache_enabled=False` casts each time."""
    weight = empty(10, 10, grad=True)
    with cuda_semantics(AMPERE), torch.autocast("cuda", cache_enabled=False), Log() as log:
        F.linear(empty(3, 10), weight)
        F.linear(empty(3, 10), weight)
    assert [op for op, _ in log.seen].count("_to_copy") == 4


def test_casts_live_until_the_outermost_region_ends() -> None:
    """A region inside does not end them."""
    weight = empty(10, 10, grad=True)
    with region(), Log() as log:
        with torch.autocast("cuda"):
            F.linear(empty(3, 10, dtype=HALF), weight)
        F.linear(empty(3, 10, dtype=HALF), weight)
    assert [op for op, _ in log.seen].count("_to_copy") == 1


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The casts that run, as types and shapes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[torch.dtype, torch.dtype, torch.Size]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.seen.append((args[0].dtype, out.dtype, out.shape))
        return out


@settings(max_examples=40)
@given(data=st.data(), inside=st.booleans(), cache=st.booleans())
def test_casts_are_those_of_torch_on_the_cpu(data: st.DataObject, inside: bool, cache: bool) -> None:
    """If the lists of CPU and CUDA agree, ours casts what torch's own kernels cast, in the same order.

    Layers are used again or not, see 16 or 32 bits, with gradients of the input or without; the backward
    pass runs inside the region or after it, with the cache of casts and without.
    """
    steps: list[str] = data.draw(
        st.lists(st.sampled_from(["first", "second", "matmul", "relu", "add"]), max_size=6)
    )
    with_grad, quiet = data.draw(st.booleans()), data.draw(st.booleans())

    def casts_on(device: str, autocast: str) -> list[tuple[torch.dtype, torch.dtype, torch.Size]]:
        # CUDA's list has `sum`, which makes the gradient of a bias, and the CPU's has not
        first = nn.Linear(6, 6, bias=not inside, device=device)
        second = nn.Linear(6, 6, bias=False, device=device)
        x = torch.ones(6, 6, device=device, requires_grad=with_grad)
        with Casts() as casts:
            with torch.autocast(autocast, dtype=BRAIN, cache_enabled=cache):
                with torch.set_grad_enabled(not quiet):
                    y = first(x)
                apply: dict[str, Callable[[Tensor], Tensor]] = {
                    "first": first,
                    "second": second,
                    "matmul": lambda y: y @ y,
                    "relu": F.relu,
                    "add": lambda y: y + x,
                }
                for step in steps:
                    y = apply[step](y)
                loss = F.mse_loss(second(y), x)
                if inside:
                    loss.backward()  # type: ignore[no-untyped-call]
            if not inside:
                loss.backward()  # type: ignore[no-untyped-call]
        seen: list[tuple[torch.dtype, torch.dtype, torch.Size]] = casts.seen
        return seen

    with cuda_semantics(AMPERE):
        ours = casts_on("meta", "cuda")
    assert ours == casts_on("cpu", "cpu")


# ---- whole jobs


def test_layer_norm_between_layers() -> None:
    """Autocast's blocks of a layer, layer norm, layer in inference, in bytes, in order of birth."""
    build = lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4))  # noqa: E731
    trace = trace_of(build, job_of("6", mode=Mode.INFER, precision=Precision.AMP_FP16), 16)
    sites = trace.sites
    forward = [
        (sites[e.site].op.removeprefix("aten.").removesuffix(".default"), e.size_bytes)
        for e in trace.events
        if isinstance(e, Alloc) and sites[e.site].op.startswith("aten") and e.category != "workspaces"
    ]
    assert forward == [
        ("empty.memory_format", 16 * 6 * 4),
        ("_to_copy", 8 * 2),  # the bias of the first layer,
        ("_to_copy", 8 * 6 * 2),  # its weight,
        ("_to_copy", 16 * 6 * 2),  # and the input, from the last argument to the first
        ("addmm", 16 * 8 * 2),
        ("_to_copy", 16 * 8 * 4),  # layer norm is in single precision
        ("native_layer_norm", 16 * 8 * 4),
        ("native_layer_norm", 16 * 4),
        ("native_layer_norm", 16 * 4),
        ("_to_copy", 4 * 2),
        ("_to_copy", 4 * 8 * 2),
        ("_to_copy", 16 * 8 * 2),
        ("addmm", 16 * 4 * 2),
    ]


def test_attention_under_autocast_runs_in_half_precision() -> None:
    """Flash attention, which single precision has none of, on Ampere."""
    layer = lambda: nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)  # noqa: E731
    job = job_of("7x32", mode=Mode.TRAIN, precision=Precision.AMP_BF16)
    assert born(trace_of(layer, job, 2), "flash_attention")
    assert not born(trace_of(layer, job_of("7x32", mode=Mode.TRAIN), 2), "flash_attention")


@pytest.mark.parametrize("precision", [Precision.AMP_FP16, Precision.AMP_BF16])
def test_recurrent_layers_run_in_float16(precision: Precision) -> None:
    """Their weights are copied into a flat buffer for each call, whatever type the region names.

    The buffer holds 4 * 6 * (5 + 6 + 2) numbers and is gone after the backward pass; the gradients arrive in
    single precision.
    """
    job = job_of("7x5", mode=Mode.TRAIN, steps=1, precision=precision)
    trace = trace_of(lambda: Recurrent(), job, 3)
    flat = 4 * 6 * (5 + 6 + 2)
    made = [
        e for e in trace.events if isinstance(e, Alloc) and trace.sites[e.site].op.startswith("aten.zeros")
    ]
    assert [e.size_bytes for e in made if e.size_bytes == 2 * flat] == [2 * flat]
    assert made[-1].block in {e.block for e in trace.events if isinstance(e, Free)}
    gradients = [
        e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is Category.GRADIENT
    ]
    assert sorted(gradients) == [96, 96, 480, 576]
    assert born(trace, "_cudnn_rnn.default").count(3 * 7 * 6 * 2) == 1  # the output


class Recurrent(nn.Module):
    """One LSTM and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


def test_a_job_that_autocast_refuses_says_why() -> None:
    """binary_cross_entropy in a model ends the trace with one line."""

    class Refused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.binary_cross_entropy(x, x)

    job = job_of("3", precision=Precision.AMP_FP16, loss=Loss.SUM)
    with pytest.raises(ModelError, match=r"binary_cross_entropy is refused under autocast"):
        trace_of(Refused, job, 2)
