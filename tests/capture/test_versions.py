"""Rules by version of torch: what emulated runs of each version show (docs/versions.md)."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.cuda.operators.sdpa_backend import CUDNN, FLASH, SdpaCall, select
from planner.capture.symbolic.builder import ProgramBuilder
from planner.jobs import Mode
from planner.program import Category, Target, first_divergence, ignore_progress
from planner.program.events import Alloc, Free, Trace
from tests.helpers.models import AMPERE, HOPPER, MIB, born, job_of, on_meta, trace_of

VERSIONS = ("2.4", "2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))


def lt_blocks(trace: Trace) -> list[bool]:
    """Return of each workspace of 1 MiB whether it is freed."""
    freed = {event.block for event in trace.events if isinstance(event, Free)}
    blocks = [event for event in trace.events if isinstance(event, Alloc) and event.size_bytes == MIB]
    return [event.block in freed for event in blocks if event.category is Category.WORKSPACE]


@pytest.mark.parametrize("version", VERSIONS)
def test_cublaslt_has_its_own_workspace_before_2_12(version: str) -> None:
    """Up to 2.8 each biased product frees its own, then the first keeps it; one column needs none."""
    found = lt_blocks(trace_of(mlp, job_of("8", steps=2, mode=Mode.TRAIN, torch=version), 4))
    if version in ("2.4", "2.6", "2.7", "2.8"):
        assert found == [True] * 4
    else:
        assert found == ([] if version in ("2.12", "") else [False])


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x[:, :, None], x[:, None]) * self.weight


@pytest.mark.parametrize(("version", "kept"), [("2.6", 1), ("2.11", 1), ("2.12", 1), ("", 0)])
def test_outer_products_use_cublas_before_2_13(version: str, kept: int) -> None:
    """Before it, the first product keeps cuBLAS's workspace of 8 1/8 MiB."""
    trace = trace_of(_Outer, job_of("8", mode=Mode.INFER, torch=version), 4)
    sizes = [event.size_bytes for event in trace.events if isinstance(event, Alloc)]
    assert sizes.count(8_519_680) == kept


@pytest.mark.parametrize("version", ["2.6", "2.9", ""])
def test_programs_follow_the_version(version: str) -> None:
    """A program specializes to the trace of a run in every version."""
    job = job_of("8", steps=2, mode=Mode.TRAIN, torch=version)
    target = Target(AMPERE, 84)
    programs = ProgramBuilder(job, on_meta(mlp), ignore_progress).programs(target)
    specialized = programs[0].specialize(7, target)
    assert specialized is not None and not first_divergence(specialized, trace_of(mlp, job, 7))


class _Sliced(nn.Module):
    def __init__(self, index: object) -> None:
        super().__init__()
        self.layer, self.index = nn.Linear(6, 6, bias=False), index

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[self.index]
        return out


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), 0),
        (slice(None), slice(1, 3)),
        (Ellipsis, slice(None), 2),
        (slice(None), None, 1),
        (slice(0, None), slice(0, 5), 1),
    ],
)
def test_a_full_slice_has_a_gradient_before_2_9(index: tuple[object, ...]) -> None:
    """`x[:, 0]` slices and selects: two gradients of the whole, since 2.9 one."""

    def gradients(version: str) -> list[int]:
        job = job_of("5x6", mode=Mode.TRAIN, torch=version)
        trace = trace_of(lambda: _Sliced(index), job, 4)
        return [size for op in ("slice_backward", "select_backward") for size in born(trace, op)]

    assert gradients("2.8") == [4 * 5 * 6 * 4, 4 * 5 * 6 * 4]
    assert gradients("2.9") == gradients("") == [4 * 5 * 6 * 4]


def test_rms_norm_is_fused_since_2_9() -> None:
    """Before, it is composed of operators whose results autograd keeps."""

    def of_norm(version: str) -> int:
        return len(born(trace_of(lambda: nn.RMSNorm(16), job_of("16", torch=version), 2), "pow"))

    assert (of_norm("2.8"), of_norm("2.9"), of_norm("")) == (1, 0, 0)


def test_rms_norm_applies_its_weight_after_the_cast_before_2_7() -> None:
    """In half precision the product with the weight is half; since 2.7 it is in float32 and cast then."""

    def products(version: str) -> list[int]:
        job = job_of("16:bfloat16", mode=Mode.INFER, torch=version)
        return born(trace_of(lambda: nn.RMSNorm(16).bfloat16(), job, 2), "mul")

    assert products("2.6") == [2 * 16 * 4, 2 * 16 * 2]
    assert products("2.7") == products("2.8") == [2 * 16 * 4, 2 * 16 * 4]


def test_flash_attention_keeps_its_generator_on_the_gpu_since_2_7() -> None:
    """The state of the generator and an unused number, 16 and 8 bytes; before, both are on the CPU."""

    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    def small(version: str) -> list[int]:
        trace = trace_of(Attend, job_of("2x64x64:float16", torch=version), 2)
        return [size for size in born(trace, "flash_attention") if size <= 16]

    assert small("2.6") == []
    assert small("2.7") == small("") == [16, 8]


def test_cudnn_attention_comes_first_since_2_11() -> None:
    """On compute capability 9.0, by default wheels: those of earlier versions have an older cuDNN."""
    x = torch.empty(2, 4, 128, 64, dtype=torch.float16, device="meta")
    calls = [SdpaCall(x, x, x, torch=version) for version in ((2, 6), (2, 10), (2, 11))]
    backends = [select(call, HOPPER) for call in calls]
    assert backends == [FLASH, FLASH, CUDNN]


def test_attention_by_math_is_in_float32_with_a_safe_softmax_since_2_5() -> None:
    """Before, halves stay halves and the softmax holds nothing beside its result."""

    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    def ops(version: str) -> tuple[int, int]:
        trace = trace_of(Attend, job_of("2x64x60:bfloat16", torch=version), 2, (7, 5))
        return len(born(trace, "_to_copy")), len(born(trace, "_safe_softmax"))

    assert ops("2.4")[0] == ops("2.4")[1] == 0
    assert ops("2.5") == ops("") and min(ops("2.5")) > 0


@pytest.mark.parametrize("has_weights", [False, True])
def test_projections_of_attention_are_deleted_since_2_12(has_weights: bool) -> None:
    """Keys and values live until the output is there before 2.12, and only until they are used since."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attention(x + 1, x, x, need_weights=has_weights)[0]
            return out

    def outlive(version: str) -> bool:
        events = trace_of(Attend, job_of("64x16", mode=Mode.INFER, torch=version), 4).events
        out, both = 4 * 64 * 16 * 4, 2 * 4 * 64 * 16 * 4
        last = {one.size_bytes: at for at, one in enumerate(events) if isinstance(one, Alloc)}
        block = next(one.block for one in events[last[both] :] if isinstance(one, Alloc))
        freed = [isinstance(one, Free) and one.block == block for one in events].index(True)
        return freed > last[out]

    assert (outlive("2.6"), outlive("2.11"), outlive("2.12"), outlive("")) == (True, True, False, False)
