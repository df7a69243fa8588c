"""The rows of torchtune: Llama 3.2 3B and 3.1 8B in its modules (torchtune_llama.py), by its recipes.

The loop: weights, gradients and AdamW's moments in bfloat16, texts packed into two rows of one length,
gradients cleared after the step. torchtune_steps.py has the rows with more flags.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

import planner
from benchmarks.accuracy.rows import Row, texts
from benchmarks.accuracy.torchtune_llama import LLAMA_3B, Llama
from benchmarks.rows import read_lines
from planner.allocator.config import MemoryLimits
from planner.allocator.replay import replay_trace
from planner.capture.session import record
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.jobs import Job, Loss, Optimizer, ZeroGrad, parse_tensor_spec

TORCHTUNE = "torchtune"
TABLE = Path(__file__).parents[1] / "published" / "torchtune.csv"
_GIVEN = "given to 0.1 GiB; "
_RECOMPUTED = (
    f"{_GIVEN}layers recomputed, as its configuration says; cause not known: with half the tokens that are "
    "stated the plan is "
)
_NOT_RECOMPUTED = f"{_GIVEN}inferred: layers not recomputed, since recomputed they take half"
_ONE_CHUNK = f"{_GIVEN}cause not known: LoRA and QLoRA are both above by one chunk of the logits, 251 MiB"
NOTES = {  # by step
    "Compiled": f"{_GIVEN}inferred: the compiled loss of torch 2.5 held the logits in float32 once more "
    "(3.9 GiB)",
    "Recomputed": f"{_GIVEN}inferred: AdamW with fused=True, since its default takes 30 GiB",
    "EightBit": f"{_GIVEN}torchao's AdamW8bit: torchtune names it and bitsandbytes' PagedAdamW8bit; "
    "cause not known: the embedding's step, as torch 2.13 compiles it, is the peak",
    "Lora": _ONE_CHUNK,
    "Qlora": _ONE_CHUNK,
    "Full8B": f"{_RECOMPUTED}0.2 % above",
    "Lora8B": f"{_RECOMPUTED}0.4 % below",
    "Qlora8B": f"{_RECOMPUTED}7.2 % below",
    "Lora70B": f"{_RECOMPUTED}0.5 % above",
    "Full8BNotRecomputed": _NOT_RECOMPUTED,
    "Lora8BNotRecomputed": _NOT_RECOMPUTED,
}


def torchtune_rows() -> list[Row]:
    """Return peak active memory, which is peak allocated (B) where one stream runs."""
    return [_row(line) for line in read_lines(TABLE)]


def _row(line: Mapping[str, str]) -> Row:
    model, gpu, batch = line["model"], line["gpu"], int(line["batch"])
    inputs = (f"{line['length']}:int64",) * 3  # tokens, labels, places
    peak_mib = _step_peak_mib(line, inputs) if line["step"] else _eager_peak_mib(inputs, batch, gpu)
    case = f"{model} {line['task']} {batch} x {line['length']} ({line['setting']})"
    truth, estimates = f"{float(line['value_gib']) * 1024}", texts({"planner": peak_mib})
    note = NOTES.get(line["step"], "given to 0.1 GiB")
    return Row(TORCHTUNE, "B", model, case, "transformer", gpu, batch, truth, estimates, note=note)


def _step_peak_mib(line: Mapping[str, str], inputs: tuple[str, ...]) -> float:
    """Return the peak of later steps of a row's class, with what it compiles compiled."""
    ranks = {"world_size": int(line["ranks"])} if line["ranks"] else {}
    file = Path(__file__).with_name("torchtune_ranks.py" if ranks else "torchtune_steps.py")
    batch, gpu = int(line["batch"]), line["gpu"]
    result = planner.estimate(
        f"{file}:{line['step']}", batch, gpu=gpu, input=inputs, compile="default", **ranks
    )
    peak_mib: float = result.to_dict()["peak_later_steps_mib"]
    return peak_mib


def _eager_peak_mib(inputs: tuple[str, ...], batch: int, gpu: str) -> float:
    """Return the peak of later steps of the recipe without a flag."""
    target = find_device(gpu).target
    job = Job.create(
        "Llama-3.2-3B",
        inputs=tuple(parse_tensor_spec(text) for text in inputs),
        loss=Loss.OUTPUT,
        optimizer=Optimizer.ADAMW,
        zero_grad=ZeroGrad.AFTER_STEP,
    )
    trace = record(job, batch, target.capability, lambda job: _build(), sm_count=target.sm_count)
    peak = replay_trace(trace, MemoryLimits()).later_steps
    assert peak is not None
    return peak.allocated_bytes / MIB


def _build() -> nn.Module:
    """Build the model in bfloat16, the cache of its rotations in float32."""
    with torch.device("meta"):
        model = Llama(LLAMA_3B)
    cache = model.cache
    model.bfloat16()
    model.cache = cache
    return model
