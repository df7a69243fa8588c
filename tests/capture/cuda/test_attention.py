"""Attention on meta runs the kernel, and takes the memory, that it would on CUDA with torch 2.13."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from planner.capture.cuda.operators.sdpa_backend import CUDNN, EFFICIENT, FLASH, MATH, SdpaCall, select
from planner.capture.workspaces.nn.mem_efficient_attention import Variant, backward_variant
from planner.jobs import Mode
from planner.program.events import Alloc, Category, Free, Trace
from tests.helpers.models import AMPERE, HOPPER, job_of, trace_of

A100, VOLTA, TURING, ADA = (8, 0), (7, 0), (7, 5), (8, 9)
B200, B300, RTX5090 = (10, 0), (10, 3), (12, 0)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def call(
    shape: tuple[int, ...] = (2, 12, 197, 64), dtype: torch.dtype = F16, *, keys: int | None = None,
    groups: int = 1, values: int | None = None, mask: tuple[int, ...] = (), grad: bool = False,
    **options: object,
) -> SdpaCall:  # fmt: skip
    """A call with a query of this shape: `keys` rows, a value's width and groups of heads may differ."""
    query = torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)
    rows = shape[-2] if keys is None else keys
    heads = (*shape[:-3], shape[-3] // groups) if len(shape) > 2 else ()
    key = torch.empty(*heads, rows, shape[-1], dtype=dtype, device="meta")
    value = torch.empty(*heads, rows, values or shape[-1], dtype=dtype, device="meta")
    given = torch.empty(mask, dtype=dtype, device="meta") if mask else None
    return SdpaCall(query, key, value, given, **options)  # type: ignore[arg-type]


SQUARE = (197, 197)

CASES = [
    # sdp_utils.cpp, dtypes and architectures
    (call(dtype=F32), AMPERE, EFFICIENT),
    (call(dtype=F64), AMPERE, MATH),
    (call(dtype=F16), AMPERE, FLASH),
    (call(dtype=BF16), AMPERE, FLASH),
    (call(dtype=F16), TURING, EFFICIENT),
    (call(dtype=BF16), TURING, MATH),
    (call(dtype=F16), VOLTA, EFFICIENT),
    (call(dtype=F16), RTX5090, FLASH),
    (call(dtype=F16), (13, 0), MATH),
    # cuDNN first on 9.0 and 10.x, halves only (check_prefer_cudnn_attention, since 2.10)
    (call(dtype=BF16), HOPPER, CUDNN),
    (call(dtype=BF16), B200, CUDNN),
    (call(dtype=BF16), B300, CUDNN),
    (call(dtype=F32), HOPPER, EFFICIENT),
    (call((2, 12, 64, 256)), HOPPER, CUDNN),
    (call((2, 12, 64, 256)), B200, FLASH),
    (call((2, 12, 64, 192), values=128), B200, CUDNN),
    (call((2, 12, 64, 60)), HOPPER, FLASH),  # cuDNN wants a multiple of 8, flash is padded to it
    (call((2, 12, 1, 64), keys=1), HOPPER, FLASH),
    (call(mask=SQUARE), HOPPER, CUDNN),
    (call(mask=(12, 197, 197)), HOPPER, EFFICIENT),  # cuDNN takes masks of rank 2 and 4
    # widths of heads
    (call((2, 12, 64, 256)), AMPERE, FLASH),
    (call((2, 12, 64, 264)), AMPERE, EFFICIENT),
    (call((2, 12, 64, 193), grad=True), AMPERE, MATH),  # 193 is no multiple of 8
    (call((2, 12, 64, 200), grad=True), AMPERE, EFFICIENT),
    (call((2, 12, 64, 200), grad=True), A100, FLASH),
    (call((2, 12, 64, 256), grad=True), ADA, FLASH),
    (call((2, 12, 64, 256), grad=True, dropout_p=0.1), ADA, EFFICIENT),
    (call((2, 12, 64, 192), values=128), AMPERE, EFFICIENT),  # latent attention: flash wants one width
    (call((2, 12, 64, 30), F32), AMPERE, MATH),  # not aligned to 16 bytes
    (call((2, 12, 64, 30), F32), VOLTA, EFFICIENT),  # which only tensor cores need
    # masks, causality, dropout
    (call(mask=SQUARE), AMPERE, EFFICIENT),
    (call(is_causal=True), AMPERE, FLASH),
    (call(is_causal=True, keys=256), AMPERE, EFFICIENT),
    (call(dtype=F32, dropout_p=0.1), AMPERE, EFFICIENT),
    # grouped queries
    (call((2, 32, 128, 128), groups=4, enable_gqa=True), AMPERE, FLASH),
    (call((2, 32, 128, 128), groups=4, enable_gqa=True), HOPPER, CUDNN),
    (call((2, 32, 128, 128), groups=4), AMPERE, MATH),
    (call((2, 32, 128, 128), F32, groups=4, enable_gqa=True), AMPERE, MATH),
    (call((2, 32, 128, 128), groups=4, enable_gqa=True, mask=(128, 128)), AMPERE, MATH),
    # other ranks, nothing to attend to
    (call((12, 197, 64)), AMPERE, MATH),
    (call(keys=0), AMPERE, MATH),
]  # fmt: skip


@pytest.mark.parametrize(("call", "capability", "kernel"), CASES)
def test_the_selector(call: SdpaCall, capability: tuple[int, int], kernel: SDPBackend) -> None:
    """The kernel of sdp_utils.cpp in torch 2.13."""
    assert select(call, capability) == kernel


def test_strides_decide() -> None:
    """A last dimension that is strided, in the query or in a mask, leaves only math."""
    turned = torch.empty(2, 12, 64, 64, dtype=F16, device="meta").transpose(-1, -2)
    assert select(SdpaCall(turned, turned, turned), HOPPER) == MATH
    plain = torch.empty(2, 12, 64, 64, dtype=F16, device="meta")
    mask = torch.empty(1, 1, 64, 1, dtype=F16, device="meta").expand(2, 1, 64, 64)
    assert select(SdpaCall(plain, plain, plain, mask), AMPERE) == MATH


def test_the_process_decides_too() -> None:
    """sdpa_kernel and deterministic algorithms are honoured; no kernel left is an error."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert select(call(), AMPERE) == EFFICIENT
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert select(call(), AMPERE) == CUDNN
    with _deterministic():
        assert select(call(), HOPPER) == FLASH
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="no available kernel"):
        select(call(dtype=F32), AMPERE)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ---- memory

Row = tuple[str, Category, int]


class Attention(nn.Module):
    """Attention of (batch, heads, rows, width); a scale is a parameter, so that gradients are recorded."""

    def __init__(
        self, dtype: torch.dtype = F32, mask: str = "", groups: int = 1, sequence_first: bool = False,
        is_causal: bool = False, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale = nn.Parameter(torch.empty((), dtype=dtype))
        self.mask, self.groups, self.first, self.causal = mask, groups, sequence_first, is_causal
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q = x.transpose(1, 2).contiguous().transpose(1, 2) * self.scale
        k, v = (q[:, :: self.groups] * self.scale for _ in range(2))
        rows = x.shape[-2]
        mask = {
            "": lambda: None,
            "bool": lambda: torch.ones(rows, rows, dtype=torch.bool, device=x.device),
            "bias": lambda: self.scale.expand(rows, rows).contiguous(),
        }[self.mask]()
        gqa = self.groups > 1
        out = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, self.causal, enable_gqa=gqa)
        # nn.MultiheadAttention lays its result out with the rows first, most others with the batch first.
        out = out.permute(2, 0, 1, 3) if self.first else out.transpose(1, 2)
        return out.contiguous() * self.scale


def taken(trace: Trace, name: str) -> list[Row]:
    """Return the requests of operators with this name, in order: the direction, the category, bytes."""
    return [
        ("backward" if "backward" in trace.sites[e.site].op else "forward", e.category, e.size_bytes)
        for e in trace.events
        if isinstance(e, Alloc) and name in trace.sites[e.site].op
    ]


def sizes(trace: Trace, name: str, direction: str, category: Category | None = None) -> list[int]:
    """Return the bytes of `taken` in one direction."""
    return [size for way, what, size in taken(trace, name) if way == direction and category in (None, what)]


def train(
    heads: str, capability: tuple[int, int] = AMPERE, dtype: str = "float32", **options: object
) -> Trace:
    """One step of training at batch 2."""
    build = lambda: Attention(getattr(torch, dtype), **options)  # type: ignore[arg-type]  # noqa: E731
    return trace_of(build, job_of(f"{heads}:{dtype}", mode=Mode.TRAIN), 2, capability)


def operator(trace: Trace, event: Alloc) -> str:
    """The operator that allocated, without namespace and overload."""
    return trace.sites[event.site].op.removeprefix("aten.").split(".")[0]


WHOLE = 2 * 12 * 197 * 64  # ViT-B/16: batch 2, heads, rows, width of a head
DELTA = 4 * 2 * 12 * 197


def test_efficient_attention_saves_rows_not_scores() -> None:
    """The kernel saves its result and 224 floats a head: 197 in steps of 32 (kernel_forward.h, kAlignLSE)."""
    assert sizes(train("12x197x64"), "efficient", "forward") == [4 * WHOLE, 4 * 2 * 12 * 224]


def test_efficient_attention_keeps_no_rows_in_inference() -> None:
    """compute_logsumexp is whether a gradient is needed."""
    trace = trace_of(Attention, job_of("12x197x64", mode=Mode.INFER), 2)
    assert sizes(trace, "efficient", "forward") == [4 * WHOLE]


def test_backward_of_floats_makes_the_product_outside() -> None:
    """Three gradients; the product, its row sums and delta, which stays; then beside delta the
    accumulator of the queries' gradient: 4 tiles of 64 x 64 floats and 16 bytes a head (kernel_backward.h).
    """
    backward = sizes(train("12x197x64"), "efficient", "backward")
    workspace = 2 * 12 * 4 * (64 * 64 * 4 + 16)
    assert backward == [4 * WHOLE] * 3 + [4 * WHOLE, DELTA, DELTA, workspace]


def test_backward_copies_a_gradient_of_another_layout() -> None:
    """nn.MultiheadAttention's result is rows first, so its gradient is copied before anything else is made
    (attention_backward.cu, grad_out_.contiguous()), and lives through the kernel.
    """
    trace = train("12x197x64", sequence_first=True)
    first = [(category, size) for way, category, size in taken(trace, "efficient") if way == "backward"][:2]
    assert first == [(Category.WORKSPACE, 4 * WHOLE), (Category.TEMPORARY, 4 * WHOLE)]


def test_backward_of_halves_computes_delta_inside() -> None:
    """float16 on Turing: delta and the accumulators of the queries' gradient; 64 fits in registers."""
    backward = sizes(train("12x197x64", TURING, "float16"), "efficient", "backward")
    assert backward == [2 * WHOLE] * 3 + [DELTA, 2 * 12 * 4 * (64 * 64 * 4 + 16)]


def test_wide_halves_accumulate_in_memory() -> None:
    """Heads of 256 halves: an accumulator like the output in the forward pass; in the backward pass one
    for keys and values of 4 splits of 64 rows each, and 4 x 4 tiles for queries.
    """
    trace = train("12x256x256", TURING, "float16")
    whole = 2 * 12 * 256 * 256
    assert sizes(trace, "efficient", "forward") == [2 * whole, 4 * 2 * 12 * 256, 4 * whole]
    workspace = 2 * 12 * 4 * (4 * 64 * (256 + 256) + 4 * 4 * (64 * 64 + 4))
    assert sizes(trace, "efficient", "backward")[-1] == workspace


@pytest.mark.parametrize(
    ("dtype", "width", "dropout", "capability", "variant"),
    [
        (F32, 64, 0.0, AMPERE, Variant(64, 64, 64, False, 80)),
        (F32, 128, 0.0, AMPERE, Variant(64, 64, 128, False, 80)),
        (F32, 128, 0.0, A100, Variant(128, 64, 128, False, 80)),
        (F16, 80, 0.0, AMPERE, Variant(128, 64, 96, True, 80)),
        (F16, 80, 0.1, AMPERE, Variant(64, 64, 128, True, 80)),
        (F16, 80, 0.0, A100, Variant(128, 128, 128, True, 80)),
        (F16, 200, 0.0, A100, Variant(128, 64, 65536, True, 80)),
        (F16, 128, 0.0, VOLTA, Variant(128, 64, 128, True, 70)),
        (F16, 128, 0.0, TURING, Variant(64, 64, 128, True, 75)),
        (F32, 32, 0.0, (6, 1), Variant(64, 64, 32, False, 50)),
    ],
)
def test_the_variant_of_the_backward_kernel(
    dtype: torch.dtype, width: int, dropout: float, capability: tuple[int, int], variant: Variant
) -> None:
    """The first kernel of cutlassB.h (torch 2.13) that takes the head and fits in shared memory."""
    assert backward_variant(dtype, width, dropout, capability) == variant


def test_flash_keeps_rows_and_two_words() -> None:
    """Flash saves its result, B x H x rows floats, 16 bytes of generator state, a word (flash_api.cpp)."""
    assert sizes(train("12x197x64", dtype="float16"), "flash", "forward") == [2 * WHOLE, DELTA, 16, 8]


def test_flash_allocates_its_state_twice_with_dropout() -> None:
    """`mha_fwd` replaces the first block, which is freed once the second is there."""
    trace = train("12x197x64", dtype="float16", dropout=0.1)
    assert sizes(trace, "flash", "forward") == [2 * WHOLE, DELTA, 16, 8, 16]
    first, _, second = [
        event.block
        for event in trace.events
        if isinstance(event, Alloc) and "flash" in trace.sites[event.site].op and event.size_bytes <= 16
    ]
    freed = [event.block for event in trace.events if isinstance(event, Free)]
    assert freed.index(first) < freed.index(second)


def test_flash_accumulates_the_queries_gradient_in_floats() -> None:
    """Three gradients, sums of 256 rows (197 in steps of 128), and 256 rows of 64 floats a head."""
    backward = sizes(train("12x197x64", dtype="float16"), "flash", "backward")
    rows = 4 * 2 * 12 * 256
    assert backward == [2 * WHOLE] * 3 + [rows, rows * 64]


def test_flash_expands_grouped_gradients() -> None:
    """8 heads of the query on 2 of keys: gradients of keys and values for every head of the query."""
    backward = sizes(train("8x128x80", dtype="bfloat16", groups=4), "flash", "backward")
    query, key = 2 * 2 * 8 * 128 * 80, 2 * 2 * 2 * 128 * 80
    assert backward == [query, key, key, 4 * 2 * 8 * 128, 4 * 2 * 8 * 128 * 96, query, query]


def test_flash_copies_a_gradient_of_another_layout() -> None:
    """grad_out.contiguous() as (batch, rows, heads, width), before the gradients are made."""
    trace = train("12x197x64", dtype="float16", sequence_first=True)
    roles = [(category, size) for way, category, size in taken(trace, "flash") if way == "backward"]
    assert roles[:2] == [(Category.WORKSPACE, 2 * WHOLE), (Category.TEMPORARY, 2 * WHOLE)]


def test_flash_pads_heads_to_eight() -> None:
    """Heads of 60 halves become 64 in copies of query, key and value (attention.cpp, pad_last_dim)."""
    trace = train("12x197x60", dtype="float16")
    assert sizes(trace, "constant_pad_nd", "forward")[:3] == [2 * WHOLE] * 3


def test_cudnn_on_hopper() -> None:
    """Statistics of B x H x rows floats, seed and offset on the GPU; a workspace of row sums and the
    queries' gradient in floats (cudnn-frontend; what its engine adds is not known).
    """
    trace = train("12x197x64", HOPPER, "bfloat16")
    assert sizes(trace, "cudnn", "forward") == [2 * WHOLE, DELTA, 8, 8]
    assert sizes(trace, "cudnn", "backward") == [2 * WHOLE] * 3 + [DELTA * 65]


# ---- masks


def test_a_mask_is_padded_in_its_own_shape() -> None:
    """A boolean mask of 197 x 197 becomes floats, and then rows of 200, before it is expanded to batch and
    heads (attention.cpp since 2.5). 200 columns are aligned.
    """
    trace = train("12x197x64", mask="bool")
    assert sizes(trace, "aten.where", "forward") == [197 * 197 * 4]
    assert sizes(trace, "constant_pad_nd", "forward") == [197 * 200 * 4]
    assert sizes(train("12x200x64", mask="bool"), "constant_pad_nd", "forward") == []


def test_a_learned_bias_gets_its_gradient_in_full() -> None:
    """The gradient of an expanded bias, as in T5, is batch x heads x rows x columns in steps of 16, and is
    summed afterwards.
    """
    backward = sizes(train("12x200x64", mask="bias"), "efficient", "backward", Category.TEMPORARY)
    assert backward == [4 * 2 * 12 * 200 * 64] * 3 + [4 * 2 * 12 * 200 * 208]


# ---- math


def test_math_computes_halves_in_floats() -> None:
    """bfloat16 on Turing: three conversions, the scaled query and key, both in order for the product, scores,
    their softmax, and the scores rounded to halves, which nobody reads (attention.cpp since 2.5).
    """
    trace = trace_of(lambda: Attention(BF16), job_of("4x6x8:bfloat16", mode=Mode.INFER), 2, TURING)
    births = [e for e in trace.events if isinstance(e, Alloc)]
    rows = [(operator(trace, e), e.size_bytes) for e in births]
    first = [name for name, _ in rows].index("_to_copy")
    heads, scores = 2 * 4 * 6 * 8, 2 * 4 * 6 * 6
    assert rows[first:-1] == [
        ("_to_copy", 4 * heads), ("_to_copy", 4 * heads), ("_to_copy", 4 * heads),
        ("mul", 4 * heads), ("mul", 4 * heads), ("clone", 4 * heads), ("clone", 4 * heads),
        ("bmm", 4 * scores), ("bmm", 8_519_680),
        ("_safe_softmax", 4 * scores), ("_safe_softmax", scores), ("_safe_softmax", 2 * 4 * 6),
        ("_safe_softmax", 4),
        ("_to_copy", 2 * scores), ("clone", 4 * heads), ("bmm", 4 * heads), ("_to_copy", 2 * heads),
        ("clone", 2 * heads),
    ]  # fmt: skip


# ---- modules


class _SelfAttention(nn.Module):
    def __init__(self, heads: int, need_weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(24, heads, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=self.need_weights)[0]
        return out


def forward_of(trace: Trace) -> list[tuple[str, int]]:
    """Operators and bytes of a forward pass, without parameters, inputs and workspaces."""
    left_out = (Category.PARAMETER, Category.INPUT, Category.WORKSPACE)
    events = [e for e in trace.events if isinstance(e, Alloc) and e.category not in left_out]
    return [(operator(trace, e), e.size_bytes) for e in events]


ROW = 2 * 10 * 4  # bytes of one column of 2 x 10 rows


def test_multi_head_attention_in_inference_is_three_kernels() -> None:
    """In eval mode without gradients: one projection, fused attention, one projection; nothing is copied."""
    trace = trace_of(lambda: _SelfAttention(2), job_of("10x24", mode=Mode.INFER), 2)
    assert forward_of(trace) == [
        ("addmm", ROW * 72),
        ("_scaled_dot_product_efficient_attention", ROW * 24),
        ("addmm", ROW * 24),
    ]


@pytest.mark.parametrize(("heads", "need_weights"), [(8, False), (2, True)])
def test_multi_head_attention_unfused_in_inference(heads: int, need_weights: bool) -> None:
    """Heads of 3 floats, which no fused kernel takes, and weights that are returned: the projection, the
    buffer of queries, keys and values, scores with their softmax in place, the context turned around, the
    projection (native_multi_head_attention_cuda).
    """
    trace = trace_of(lambda: _SelfAttention(heads, need_weights), job_of("10x24", mode=Mode.INFER), 2)
    scores = 2 * heads * 10 * 10 * 4
    weights = [("sum", 2 * 10 * 10 * 4)] if need_weights else []
    assert forward_of(trace) == [
        ("mm", ROW * 72), ("empty", ROW * 72), ("bmm", scores),
        ("clone", ROW * 24), ("addmm", ROW * 24), *weights,
    ]  # fmt: skip


def test_a_mask_has_the_softmax_of_unfused_attention_beside_its_scores() -> None:
    """masked_softmax (attention.cpp) is in place only without a mask."""
    mask = torch.zeros(10, 10, dtype=torch.bool)

    class Masked(_SelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x, x, x, attn_mask=mask.to(x.device), need_weights=False)[0]
            return out

    trace = trace_of(lambda: Masked(8), job_of("10x24", mode=Mode.INFER), 2)
    scores = 2 * 8 * 10 * 10 * 4
    assert [row for row in forward_of(trace) if row[1] == scores] == [("bmm", scores), ("_softmax", scores)]


def test_multi_head_attention_with_weights_in_training() -> None:
    """need_weights is the default, and its path keeps the scores' softmax (torch.nn.functional)."""
    trace = trace_of(lambda: _SelfAttention(2, True), job_of("10x24"), 2)
    held = [row for row in forward_of(trace) if "attention" in row[0] or "softmax" in row[0]]
    assert held == [("_softmax", 2 * 2 * 10 * 10 * 4)]


def test_an_encoder_layer_in_inference_takes_its_fast_path() -> None:
    """_transformer_encoder_layer_fwd (transformer.cpp): sums in place, the activation in the product."""
    layer = lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # noqa: E731
    trace = trace_of(layer, job_of("10x16", mode=Mode.INFER), 2)
    norm = [("native_layer_norm", ROW * 16), ("native_layer_norm", ROW), ("native_layer_norm", ROW)]
    assert forward_of(trace) == [
        ("addmm", ROW * 48), ("_scaled_dot_product_efficient_attention", ROW * 16), ("addmm", ROW * 16),
        *norm,
        ("addmm", ROW * 32), ("addmm", ROW * 16), *norm,
    ]  # fmt: skip
    assert trace.unknown_ops == ()


class _Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.encoder(x, src_key_padding_mask=padding)
        return out


def test_an_encoder_with_a_padding_mask_runs_unfused() -> None:
    """A mask rules the fused kernels out of the fast path; nothing is packed, since values are not known."""
    trace = trace_of(_Padded, job_of("10x16", "10:bool", mode=Mode.INFER), 2)
    names = [name for name, _ in forward_of(trace)]
    assert "bmm" in names and "_softmax" in names
    assert not any("attention" in name for name in names)


@pytest.mark.parametrize(
    ("family", "dtype", "masked", "capability", "kernel"),
    [
        ("bert", "bfloat16", False, AMPERE, FLASH),
        ("bert", "bfloat16", True, AMPERE, EFFICIENT),
        ("gpt2", "bfloat16", False, AMPERE, FLASH),
        ("llama", "bfloat16", False, AMPERE, FLASH),
        ("llama", "bfloat16", False, HOPPER, CUDNN),
        ("llama", "float32", False, AMPERE, MATH),  # grouped queries in floats
        ("llama", "bfloat16", True, AMPERE, EFFICIENT),  # keys and values are repeated
        ("t5", "bfloat16", False, AMPERE, EFFICIENT),
        ("t5", "bfloat16", False, HOPPER, EFFICIENT),  # cuDNN takes no bias that learns
    ],
)
def test_transformers_get_the_kernel_that_the_gpu_gives_them(
    family: str, dtype: str, masked: bool, capability: tuple[int, int], kernel: SDPBackend
) -> None:
    """Calls of transformers' sdpa integration get it (transformers/integrations/sdpa_attention.py)."""
    build = lambda: _Likeness(family, getattr(torch, dtype), masked)  # noqa: E731
    trace = trace_of(build, job_of(f"64x64:{dtype}", mode=Mode.TRAIN), 2, capability)
    ops = {op for op, _ in forward_of(trace)}
    names = {FLASH: "flash", EFFICIENT: "efficient", CUDNN: "cudnn"}
    fused = {k for k, name in names.items() if f"_scaled_dot_product_{name}_attention" in ops}
    math = {MATH} if "_safe_softmax" in ops else set()
    assert fused | math == {kernel}


class _Likeness(nn.Module):
    """The attention of a family of models, as their code calls scaled_dot_product_attention."""

    def __init__(self, family: str, dtype: torch.dtype, masked: bool) -> None:
        super().__init__()
        groups = 4 if family == "llama" else 1
        self.family, self.masked = family, masked
        self.query = nn.Linear(64, 64, dtype=dtype)
        self.key_value = nn.Linear(64, 128 // groups, dtype=dtype)
        self.bias = nn.Embedding(32, 4, dtype=dtype) if family == "t5" else None

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        query = self.query(x).view(batch, rows, 4, 16).transpose(1, 2)
        pairs = self.key_value(x).chunk(2, -1)
        key, value = (t.view(batch, rows, -1, 16).transpose(1, 2) for t in pairs)
        mask = None
        if self.masked:
            mask = torch.ones(batch, 1, rows, rows, dtype=torch.bool, device=x.device)
        if self.bias is not None:
            buckets = torch.empty(rows, rows, dtype=torch.long, device=x.device)
            mask = self.bias(buckets).permute(2, 0, 1).unsqueeze(0).contiguous()
        gqa = key.shape[1] != query.shape[1]
        if gqa and mask is not None:
            key, value = key.repeat_interleave(4, 1), value.repeat_interleave(4, 1)
            gqa = False
        is_causal = self.family in ("gpt2", "llama") and mask is None
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, enable_gqa=gqa)
        return out.transpose(1, 2).reshape(batch, rows, 64)
