"""Traces of deep models from those of shallow ones, held against captures of the deep ones."""

import re
from typing import Any

import pytest

from planner.capture import construct_model, find_constructor, record
from planner.jobs import (
    Checkpoint,
    ClipGradients,
    FsdpArguments,
    Job,
    Loss,
    Optimizer,
    OptimizerImpl,
    TensorSpec,
)
from planner.program import (
    Alloc,
    Category,
    NotRepeatedError,
    Phase,
    PhaseStart,
    Site,
    Trace,
    compare_depths,
    first_divergence,
)  # fmt: skip
from planner.program.events import validate

pytestmark = pytest.mark.slow

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?=\.|$)")
BLOCKS_OF_ANY = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)(?=\.|$)")
ARGUMENTS = (
    ("hidden_size", 64), ("intermediate_size", 192), ("num_attention_heads", 4), ("num_key_value_heads", 2),
    ("vocab_size", 1000),
)  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpoints": {"checkpoint": Checkpoint.BLOCKS},
    "clipped": {"clip_gradients": ClipGradients.NORM, "accumulate": 2},
    "fused": {"optimizer_impl": OptimizerImpl.FUSED, "keep_grads": True},
    "sharded": {"fsdp": 4, "fsdp_arg": FsdpArguments(param_dtype="bf16", reduce_dtype="fp32")},
    "sharded, checkpoints": {
        "fsdp": 7,
        "checkpoint": Checkpoint.BLOCKS,
        "clip_gradients": ClipGradients.NORM,
    },
    "sharded, kept": {
        "fsdp": 8,
        "fsdp_arg": FsdpArguments(reshard_after_forward=False, replicas=2),
        "accumulate": 2,
    },
    "sharded, in tensors too": {"fsdp": 64, "tp": 2, "checkpoint": Checkpoint.BLOCKS, "accumulate": 2},
}


GPT2_ARGUMENTS = (("n_embd", 64), ("n_head", 4), ("vocab_size", 1000))
OF_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "in turn": {"model": "hf:mistral", "optimizer_impl": OptimizerImpl.FOR_LOOP},
    "all parameters at once": {"model": "hf:mistral"},
    "adapters": {"model": "hf:mistral", "peft": "lora"},
    "parameters of many sizes": {"model": "hf:gpt2", "model_args": GPT2_ARGUMENTS},
    "without momentum": {"model": "hf:gpt2", "model_args": GPT2_ARGUMENTS, "optimizer": Optimizer.SGD},
}


def capture(layers: int, **recipe: Any) -> Trace:
    job = Job.create(
        "hf:llama",
        model_args=ARGUMENTS,
        inputs=(TensorSpec((96,), "int64"),),
        loss=Loss.OUTPUT,
        optimizer=Optimizer.ADAMW,
    )
    job = job.replace(**recipe)
    job = job.replace(model_args=(*job.model.args, ("num_hidden_layers", layers)))
    constructor = find_constructor(job)
    return record(job, 3, (9, 0), lambda each: construct_model(each, constructor), sm_count=132)


@pytest.mark.parametrize("name", RECIPES)
def test_deepened_trace_is_that_of_the_deep_model(name: str) -> None:
    recipe = RECIPES[name]
    captured = {layers: capture(layers, **recipe) for layers in (4, 5, 9)}
    repeated = compare_depths(captured[4], captured[5], LAYER)
    for layers, trace in captured.items():
        deepened = repeated.with_more(layers - 4)
        validate(deepened)
        assert first_divergence(deepened, trace) == ""


@pytest.mark.parametrize("name", OF_OPTIMIZERS)
def test_what_an_optimizer_does_to_all_parameters_follows_the_depth(name: str) -> None:
    """An optimizer allocates for the parameters of all blocks, then frees, whatever their sizes."""
    recipe = OF_OPTIMIZERS[name]
    repeated = compare_depths(capture(4, **recipe), capture(5, **recipe), BLOCKS_OF_ANY)
    assert first_divergence(repeated.with_more(4), capture(8, **recipe)) == ""


def test_traces_of_other_models_are_no_repetition() -> None:
    one = Trace(
        (PhaseStart(0, Phase.SETUP), Alloc(1, 512, Category.PARAMETER, 0)), (Site("layers.0", "a"),), 1
    )
    other = Trace(
        (PhaseStart(0, Phase.SETUP), Alloc(1, 1024, Category.PARAMETER, 0)), (Site("head", "a"),), 1
    )
    with pytest.raises(NotRepeatedError, match="event 1 of 2 has no counterpart"):
        compare_depths(one, other, LAYER)
