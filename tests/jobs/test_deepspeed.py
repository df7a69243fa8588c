"""DeepSpeed's configuration: what is read, filled and refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UsageError
from planner.jobs import (
    ClipGradients,
    Job,
    Precision,
    TensorSpec,
    deepspeed_stage,
    fill_deepspeed,
    resolve_job,
)
from planner.jobs.files.deepspeed import read_deepspeed

INPUTS = [TensorSpec((3, 64, 64))]


def text_of(**more: Any) -> str:
    """A configuration of stage 2 with more keys."""
    return json.dumps({"zero_optimization": {"stage": 2}, **more})


def job_with(config: dict[str, Any], **fields: Any) -> Job:
    """A job with a configuration."""
    return Job.create("net", deepspeed=read_deepspeed(json.dumps(config)), world_size=2).replace(**fields)


def test_a_file_and_its_text_are_the_same(tmp_path: Path) -> None:
    """The contents of a file may be given themselves."""
    path = tmp_path / "zero.json"
    path.write_text(text_of(gradient_clipping=1.0))
    assert read_deepspeed(str(path)) == read_deepspeed(text_of(gradient_clipping=1.0))
    assert deepspeed_stage(Job.create("net", deepspeed=read_deepspeed(str(path)))) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nowhere.json", "--deepspeed nowhere.json: cannot be read"),
        ("{", "--deepspeed: is no JSON"),
        ("{}", "zero_optimization.stage has to be 1, 2 or 3"),
        (text_of(zero_optimization={"stage": 0}), "zero_optimization.stage has to be 1, 2 or 3"),
        (text_of(bf16=True), "bf16 has to be an object"),
        (text_of(tensor_parallel={"autotp_size": 2}), "tensor_parallel is not planned"),
        (
            text_of(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}}),
            "zero_optimization.offload_param is not planned; planner run emulates such a script",
        ),
        (text_of(optimizer={"type": "Lamb"}), "optimizer.type 'lamb' is not planned"),
    ],
)
def test_what_is_not_planned_of_a_file_is_refused(text: str, words: str) -> None:
    """One line names the key and what to do."""
    with pytest.raises(UsageError, match=re.escape(words)):
        read_deepspeed(text)


def test_what_is_off_is_not_refused() -> None:
    """Keys of what is not planned may say that it is not used."""
    off = {"stage": 2, "offload_optimizer": {"device": "none"}, "zero_hpz_partition_size": None}
    assert read_deepspeed(text_of(zero_optimization=off, flops_profiler={}))


def test_auto_is_filled_as_transformers_does() -> None:
    """Precision, accumulation and clipping are the job's, buckets follow from the hidden size."""
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    }
    job = job_with(
        {
            "zero_optimization": zero,
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto", "loss_scale": 0},
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
            "scheduler": {"type": "WarmupLR"},
        },
        precision=Precision.AMP_BF16,
        accumulate=4,
        clip_gradients=ClipGradients.NORM,
    )
    assert fill_deepspeed(job, 8, 100) == {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 10_000,
            "stage3_prefetch_bucket_size": 9_000,
            "stage3_param_persistence_threshold": 1_000,
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0},
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"eps": 1e-6}},
    }
    assert fill_deepspeed(job, 8, None)["zero_optimization"] == {"stage": 3}


def test_what_the_file_says_stands() -> None:
    """Options fill what is "auto" or missing, and change nothing else."""
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    filled = fill_deepspeed(job_with(config, accumulate=4, clip_gradients=ClipGradients.NORM), 8, 64)
    assert filled == {**config, "train_micro_batch_size_per_gpu": 8}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deepspeed": text_of()}, "--deepspeed: give the number of ranks"),
        ({"fsdp": 2}, "--deepspeed with --fsdp is not planned"),
        ({"precision": "amp-fp16"}, "--deepspeed with --precision amp-fp16 is not planned"),
        ({"precision": "bf16"}, "--deepspeed with --precision bf16 is not planned"),
        ({"mode": "infer"}, "--deepspeed with --mode infer is not planned: DeepSpeed trains in the"),
        (
            {"torch": "2.12"},
            "--deepspeed with --torch 2.12 is not planned: DeepSpeed is planned as in",
        ),
    ],
)
def test_what_is_not_planned_with_deepspeed_is_refused(options: dict[str, Any], words: str) -> None:
    """One line names the option and what to do."""
    given = (
        options
        if {"deepspeed", "world_size"} & set(options)
        else {"deepspeed": text_of(), "world_size": 2, **options}
    )
    with pytest.raises(UsageError, match=re.escape(words)):
        resolve_job("torchvision:resnet18", {}, **{"inputs": INPUTS, **given})


def test_precision_may_be_that_of_the_file() -> None:
    """A model in bf16 is what the file makes of it."""
    given = {"inputs": INPUTS, "world_size": 2, "precision": "bf16"}
    for enabled in (True, "auto"):
        job = resolve_job("torchvision:resnet18", {}, **given, deepspeed=text_of(bf16={"enabled": enabled}))
        assert job.loop.precision is Precision.BF16
