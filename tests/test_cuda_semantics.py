"""Operators on meta take the paths, and the memory, that they take on a CUDA GPU."""

import threading

import pytest
import torch
from test_recorder import Apply
from torch import Tensor, nn
from torch.nn import functional as F
from tracing import AMPERE, HOPPER, MIB, born, job_of, trace_of

from planner.events import Alloc, Role
from planner.job import Mode
from planner.trace.cuda import cuda_semantics

TURING, VOLTA = (7, 5), (7, 0)
HEADS = "12x197x64"  # ViT-B/16: heads, rows, width of a head


class Attention(nn.Module):
    """Attention of a tensor with itself; the scale is a parameter, so that gradients are recorded."""

    def __init__(self, mask: str = "", dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty((), dtype=dtype))
        self.mask, self.dropout = mask, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x * self.scale, x * self.scale, x * self.scale
        rows = x.shape[-2]
        mask = {
            "": None,
            "bool": torch.ones(rows, rows, dtype=torch.bool, device=x.device),
            "float": torch.ones(rows, rows, dtype=x.dtype, device=x.device),
        }[self.mask]
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout)


def attention_ops(heads: str, capability: tuple[int, int], **options: object) -> set[str]:
    """The attention kernels of a forward pass at batch 2."""
    dtype = str(options.get("dtype", torch.float32)).removeprefix("torch.")
    build = lambda: Attention(**options)  # type: ignore[arg-type]  # noqa: E731
    trace = trace_of(build, job_of(f"{heads}:{dtype}"), 2, capability)
    ops = {trace.sites[event.site].op for event in trace.events if isinstance(event, Alloc)}
    return {op.removesuffix(".default") for op in ops if "attention" in op or "softmax" in op}


EFFICIENT = {"aten._scaled_dot_product_efficient_attention"}
FLASH = {"aten._scaled_dot_product_flash_attention"}
MATH = {"aten._safe_softmax"}


@pytest.mark.parametrize(
    ("heads", "capability", "options", "kernel"),
    [
        (HEADS, AMPERE, {}, EFFICIENT),  # floats: flash wants halves
        (HEADS, TURING, {}, EFFICIENT),
        (HEADS, AMPERE, {"mask": "bool"}, EFFICIENT),
        (HEADS, AMPERE, {"dropout": 0.1}, EFFICIENT),
        (HEADS, AMPERE, {"dtype": torch.float16}, FLASH),
        (HEADS, AMPERE, {"dtype": torch.bfloat16}, FLASH),
        (HEADS, TURING, {"dtype": torch.float16}, EFFICIENT),  # flash wants Ampere
        (HEADS, TURING, {"dtype": torch.bfloat16}, MATH),  # and so do kernels for bfloat16
        (HEADS, AMPERE, {"dtype": torch.float16, "mask": "float"}, EFFICIENT),  # flash takes no mask
        ("2x10x30", AMPERE, {}, MATH),  # heads of 30 floats are not aligned to 16 bytes
        ("2x10x30", VOLTA, {}, EFFICIENT),  # which only tensor cores ask for
        ("2x10x264", AMPERE, {"dtype": torch.float16}, EFFICIENT),  # too wide for flash
    ],
)
def test_attention_chooses_as_the_gpu_does(
    heads: str, capability: tuple[int, int], options: dict[str, object], kernel: set[str]
) -> None:
    """The kernel by capability, dtype, mask and width of a head (sdp_utils.cpp)."""
    assert attention_ops(heads, capability, **options) == kernel


def test_efficient_attention_saves_rows_not_scores() -> None:
    """What ViT-B/16's attention keeps for one batch of 2: its result and 224 floats a head (197 in steps
    of 32).
    """
    trace = trace_of(Attention, job_of(HEADS), 2)
    assert born(trace, "efficient") == [2 * 12 * 197 * 64 * 4, 2 * 12 * 224 * 4]


def test_a_mask_that_is_not_aligned_is_written_out_in_full() -> None:
    """197 columns are padded to 208 in a mask of batch x heads x rows, as attention.cpp does."""
    trace = trace_of(lambda: Attention("float"), job_of(HEADS), 2)
    assert born(trace, "constant_pad_nd") == [2 * 12 * 197 * 208 * 4]
    aligned = trace_of(lambda: Attention("float"), job_of("12x208x64"), 2)
    assert born(aligned, "constant_pad_nd") == []


def test_backward_of_efficient_attention_takes_a_product_in_floats_only() -> None:
    """Float kernels get the row sums of grad * out from outside, by way of the whole product."""
    trace = trace_of(Attention, job_of(HEADS, mode=Mode.TRAIN), 2)
    backward = "efficient_attention_backward"
    sizes = [
        (e.role, e.fixed_bytes) for e in trace.events if isinstance(e, Alloc) and _op(trace, e, backward)
    ]
    whole, rows = 2 * 12 * 197 * 64 * 4, 2 * 12 * 197 * 4
    assert sizes == [(Role.TEMPORARY, whole)] * 3 + [(Role.WORKSPACE, whole), (Role.WORKSPACE, 2 * rows)]


def _op(trace: object, event: Alloc, name: str) -> bool:
    return name in trace.sites[event.site].op  # type: ignore[attr-defined]


def test_dropout_keeps_a_boolean_mask() -> None:
    """The fused kernel keeps one byte an element, not a mask of floats; without training it keeps nothing."""
    assert born(trace_of(lambda: nn.Dropout(0.1), job_of("1000"), 2)) == [8000, 8000, 2000]
    assert born(trace_of(lambda: nn.Dropout(0.0), job_of("1000"), 2)) == [8000]
    assert born(trace_of(lambda: nn.Dropout(0.1), job_of("1000", mode=Mode.INFER), 2)) == [8000]


def test_linear_adds_its_bias_in_place_to_a_strided_input() -> None:
    """A transposed input is copied and multiplied, and the bias goes into the product: no second output."""
    trace = trace_of(lambda: _Transposed(), job_of("7x5"), 3)
    outputs = [size for size in born(trace) if size == 3 * 7 * 11 * 4]
    assert outputs == [3 * 7 * 11 * 4]


class _Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(0, 1))


@pytest.mark.parametrize(("capability", "workspace"), [(AMPERE, 8_519_680), (HOPPER, 32 * MIB)])
def test_cublas_takes_one_workspace_a_thread_for_good(capability: tuple[int, int], workspace: int) -> None:
    """In training two, in inference one, and none where nothing is multiplied; they never die."""
    layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # noqa: E731
    for mode, count in ((Mode.TRAIN, 2), (Mode.INFER, 1)):
        trace = trace_of(layer, job_of("4", mode=mode, steps=3), 2, capability)
        kept = [e for e in trace.events if isinstance(e, Alloc) and e.role is Role.WORKSPACE]
        assert [e.fixed_bytes for e in kept] == [workspace] * count
        deaths = {event.block for event in trace.events if type(event).__name__ == "Free"}
        assert not deaths & {e.block for e in kept}
    assert Role.WORKSPACE not in {
        e.role for e in trace_of(lambda: Apply(torch.relu), job_of("4"), 2).events if isinstance(e, Alloc)
    }


def test_attention_in_inference_takes_the_fast_path() -> None:
    """nn.MultiheadAttention in eval mode without gradients: one projection, fused attention, one projection.

    Nothing is copied, no row sums are kept. Heads whose width is no multiple of 8 take unfused kernels.
    """
    trace = trace_of(lambda: _SelfAttention(2), job_of("10x16", mode=Mode.INFER), 2)
    forward = [
        e for e in trace.events if isinstance(e, Alloc) and e.role in (Role.ACTIVATION, Role.TEMPORARY)
    ]
    rows = 2 * 10
    assert [(trace.sites[e.site].op, e.fixed_bytes) for e in forward] == [
        ("aten.addmm.default", rows * 48 * 4),
        ("aten._scaled_dot_product_efficient_attention.default", rows * 16 * 4),
        ("aten.addmm.default", rows * 16 * 4),
    ]
    unfused = trace_of(lambda: _SelfAttention(4), job_of("10x16", mode=Mode.INFER), 2)
    # the output; then q, k, v beside 10 x 10 scores of 4 heads and their softmax; and cuBLAS's workspace
    sizes = born(unfused, "_native_multi_head_attention")
    assert sizes == [rows * 16 * 4, rows * 48 * 4 + 2 * (2 * 4 * 10 * 10 * 4), 8_519_680]


class _SelfAttention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


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
