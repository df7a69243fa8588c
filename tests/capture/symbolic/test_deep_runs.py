"""Runs of deep models that follow from runs of shallow models, against runs of the deep models."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.capture import construct_model, find_constructor, record
from planner.capture.models.depth import find_depth
from planner.capture.symbolic.deep_runs import open_deep_runs
from planner.capture.symbolic.kernel_calls import RecordedCall, RecordedRun
from planner.jobs import (
    Checkpoint,
    ClipGradients,
    Compile,
    Depth,
    Job,
    Loss,
    Mode,
    Optimizer,
    Precision,
    Quantize,
    TensorSpec,
)
from planner.program import Target, first_divergence

GPU = Target.for_capability((9, 0), 132)
TOKENS = (TensorSpec((96,), "int64"),)
SIZES = (
    ("hidden_size", 64), ("intermediate_size", 192), ("num_attention_heads", 4), ("num_key_value_heads", 4),
    ("vocab_size", 1000), ("num_hidden_layers", 28),
)  # fmt: skip
LLAMA = Job.create("hf:llama", model_args=SIZES, inputs=TOKENS, loss=Loss.OUTPUT, optimizer=Optimizer.ADAMW)
WINDOWS = (("use_sliding_window", True), ("max_window_layers", 10), ("sliding_window", 32))
EXPERTS = (
    ("n_routed_experts", 8), ("num_experts_per_tok", 2), ("n_group", 2), ("topk_group", 1),
    ("moe_intermediate_size", 32), ("first_k_dense_replace", 10),
)  # fmt: skip
DEEP: dict[str, dict[str, Any]] = {
    "plain": {},
    "in turn, clipped": {
        "checkpoint": Checkpoint.BLOCKS,
        "clip_gradients": ClipGradients.NORM,
        "accumulate": 2,
    },
    "autocast": {"optimizer": Optimizer.SGD, "precision": Precision.AMP_BF16},
    "adapters": {"model": "hf:qwen2", "peft": "lora"},
    "averaged and evaluated": {"ema": True, "evaluate": True},
    "forward passes": {"mode": Mode.INFER},
    "sharded": {"fsdp": 4, "checkpoint": Checkpoint.BLOCKS},
    "quantized": {"quantize": Quantize.NF4, "precision": Precision.BF16, "peft": "lora"},
}
WHOLE: dict[str, dict[str, Any]] = {
    "few blocks": {"model_args": (*SIZES[:-1], ("num_hidden_layers", 19))},
    "windows from the tenth block on": {"model": "hf:qwen2", "model_args": (*SIZES, *WINDOWS)},
    "experts from the tenth block on": {"model": "hf:deepseek_v3", "model_args": (*SIZES, *EXPERTS)},
    "blocks that are frozen by number": {"freeze": ("model.layers.1*",)},
    "adapters of some blocks": {"peft": "lora", "peft_arg": (("layers_to_transform", (0, 27)),)},
    "compiled": {"compile": Compile.DEFAULT},
}


def recorder(job: Job, depths: list[int]) -> Callable[[Job], RecordedRun]:
    """Return a function that runs a job's model and appends its depth to `depths`."""
    constructor = find_constructor(job)

    def run(each: Job) -> RecordedRun:
        depths.append(dict(each.model.args)["num_hidden_layers"])
        calls: list[RecordedCall] = []
        trace = record(
            each, 3, GPU.capability, lambda job: construct_model(job, constructor), None, calls, sm_count=132
        )
        return RecordedRun(trace, tuple(calls))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_an_extrapolated_run_is_that_of_the_deep_model(name: str) -> None:
    """Events and kernel calls with their arguments are those of the whole model, from 4, 5 and 7 blocks.

    With longer samples they are so from 5 blocks alone.
    """
    job, depths = LLAMA.replace(**DEEP[name]), []
    runs, run = open_deep_runs(job), recorder(job, depths)
    assert runs is not None
    deep = runs.run(job, GPU, run)
    assert deep is not None
    whole = run(job)
    assert (first_divergence(deep.trace, whole.trace), deep.calls == whole.calls) == ("", True)
    note = "of its 28 equal blocks 4 and 5 are traced, and what one adds is repeated"
    assert (deep.trace.notes, depths) == ((*whole.trace.notes, note), [4, 5, 7, 28])
    longer, depths[:] = job.replace(inputs=(TensorSpec((136,), "int64"),)), []
    deep, whole = runs.run(longer, GPU, run), run(longer)
    assert deep is not None and depths == [5, 28]
    assert (first_divergence(deep.trace, whole.trace), deep.calls == whole.calls) == ("", True)


@pytest.mark.slow
def test_an_extrapolation_is_checked_once() -> None:
    """A further run, also with samples of another size, needs one shallow run if sizes alone differ."""
    depths: list[int] = []
    job = LLAMA.replace(optimizer=Optimizer.ADAGRAD)
    longer = job.replace(inputs=(TensorSpec((128,), "int64"),))
    for each in (job, longer):
        runs = open_deep_runs(each)
        assert runs is not None
        assert runs.run(each, GPU, recorder(each, depths)) is not None
    assert depths == [4, 5, 7, 5]


def test_a_model_in_a_folder_is_read_anew(tmp_path: Path) -> None:
    """Its configuration may have changed since the last plan."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **dict(SIZES)}
    job = LLAMA.replace(model=f"hf:{tmp_path}", model_args=())
    for blocks in (28, 30):
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": blocks}))
        runs = open_deep_runs(job)
        assert runs is not None and runs.depth == Depth("num_hidden_layers", blocks)


@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_model_runs_if_its_depth_may_matter(name: str) -> None:
    """No shallow model tells what a block does that only a deep model has, or that an option chooses."""
    assert open_deep_runs(LLAMA.replace(**WHOLE[name])) is None


def test_traces_of_ranks_need_equal_blocks_too() -> None:
    """Of 12 blocks, those from the ninth on have experts, which no model of 4, 5 or 7 blocks has."""
    twelve = (*SIZES[:-1], ("num_hidden_layers", 12))
    late = (*twelve, *EXPERTS[:-1], ("first_k_dense_replace", 8))
    assert find_depth(LLAMA.replace(model_args=twelve), 8) == Depth("num_hidden_layers", 12)
    assert find_depth(LLAMA.replace(model="hf:deepseek_v3", model_args=late), 8) is None
