"""Kernels of Triton are launched by no capture, and the Python around them is planned as it is."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from planner.capture.cuda.triton_kernels import launches_skipped, triton_importable
from planner.capture.session import record
from planner.errors import ModelError
from planner.jobs import Job, Loss, Mode, parse_tensor_spec
from planner.program.events import Alloc, Category
from tests.helpers.models import AMPERE, born

HEAD = """
import torch
import triton
import triton.language as tl
from torch import nn
from triton.language.math import rsqrt

LIMIT = tl.constexpr(8)
WIDTH = LIMIT.value * 2


BEST = triton.Config({"BLOCK": 64}, num_warps=4)
assert BEST.all_kwargs() == {"BLOCK": 64, "num_warps": 4} or BEST.all_kwargs()["num_stages"]


@triton.autotune(configs=[BEST], key=["n"])
@triton.jit
def kernel(x, loss, n, BLOCK: tl.constexpr):
    tl.store(loss, rsqrt(tl.load(x)))


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        rows = triton.next_power_of_2(triton.cdiv(x.shape[0], 4))
        gradient, loss = torch.zeros_like(x), torch.zeros(x.shape[0], device=x.device)
        for start in range(0, x.shape[0], rows):
            chunk = x[start : start + rows] @ weight.t()
            kernel[(chunk.shape[0],)](chunk, loss, chunk.shape[1])
            gradient[start : start + rows] = chunk @ weight
        ctx.save_for_backward(gradient)
        return loss.sum()

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        kernel[lambda meta: (gradient.shape[0],)](gradient, upstream, 1, BLOCK=64)
        return gradient, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1000)

    def forward(self, x):
        return Fused.apply(self.first(x), self.head.weight)
"""


def job_in(folder: Path) -> Job:
    """The job of the model above."""
    file = folder / "fused.py"
    file.write_text(HEAD)
    inputs = (parse_tensor_spec("16"),)
    return Job.create(f"{file}:Model", inputs=inputs, mode=Mode.TRAIN, steps=2, loss=Loss.OUTPUT)


def test_a_loss_in_chunks_keeps_no_logits(tmp_path: Path) -> None:
    """64 rows in chunks of 16: no block has all logits, and each chunk's are freed before the next."""
    trace = record(job_in(tmp_path), 64, AMPERE)
    chunk = 16 * 1000 * 4
    sizes = [event.size_bytes for event in trace.events if isinstance(event, Alloc)]
    assert born(trace, "mm").count(chunk) == 4 * 2  # in both steps
    assert 64 * 1000 * 4 not in sizes
    kept = [e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is Category.ACTIVATION]
    assert chunk not in kept
    assert not trace.unknown_ops


def test_no_module_of_triton_is_left_behind(tmp_path: Path) -> None:
    """Triton that is not installed is missing again after a capture."""
    before = sys.modules.get("triton")
    record(job_in(tmp_path), 4, AMPERE)
    assert sys.modules.get("triton") is before


def test_libraries_that_ask_see_no_triton() -> None:
    """An import from torch fails as it does outside of a capture."""
    if "triton" in sys.modules:
        pytest.skip("Triton is installed")
    asking: dict[str, Any] = {"__name__": "torch.asking"}
    with triton_importable(), pytest.raises(ImportError):
        exec("import triton", asking)


def test_an_installed_triton_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runners return at once while a loop runs, and are themselves again afterwards."""

    class Runner:
        def run(self) -> str:
            return "launched"

    jit = ModuleType("triton.runtime.jit")
    vars(jit)["JITFunction"] = Runner
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", jit)
    with launches_skipped():
        assert Runner().run() is None
    assert Runner().run() == "launched"


def test_liger_patches_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--liger` patches the model of the capture; transformers' functions are themselves afterwards."""
    pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    seen = []

    def patch(model: nn.Module) -> None:
        modeling_llama.apply_rotary_pos_emb = None  # type: ignore[assignment]
        forward = model.forward
        model.forward = lambda **inputs: seen.append(type(model).__name__) or forward(**inputs)  # type: ignore
        modeling_llama.apply_rotary_pos_emb = rotate

    rotate = modeling_llama.apply_rotary_pos_emb
    patches = SimpleNamespace(
        MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": patch}, _apply_liger_kernel_to_instance=patch
    )
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)  # type: ignore[arg-type]
    for package in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    arguments = (("hidden_size", 16), ("num_hidden_layers", 1), ("num_attention_heads", 2), ("vocab_size", 9))
    inputs = tuple(parse_tensor_spec(f"{name}=4:int64") for name in ("input_ids", "attention_mask", "labels"))
    job = Job.create(
        "hf:LlamaForCausalLM", model_args=arguments, inputs=inputs, loss=Loss.OUTPUT, steps=2, liger=True
    )
    record(job, 2, AMPERE)
    assert seen == ["LlamaForCausalLM"] * 2
    assert modeling_llama.apply_rotary_pos_emb is rotate
    with pytest.raises(ModelError, match="Liger has no kernels for it; remove --liger"):
        record(job.replace(model="hf:BertForMaskedLM"), 2, AMPERE)
