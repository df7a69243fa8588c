"""Jobs that files of torchtitan describe."""

from pathlib import Path
from typing import Any

import pytest

from planner.api.request.request import make_job
from planner.errors import UsageError
from planner.jobs import Checkpoint, ClipGradients, FsdpArguments, Job, Optimizer, OptimizerImpl, Precision

FILE = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "debugmodel"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 1024
max_norm = 1.0
steps = 1000
[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 1
[compile]
enable = false
components = ["model", "loss"]
[activation_checkpoint]
mode = "full"
[validation]
enable = false
freq = 500
[quantize.linear.float8]
filter_fqns = ["output"]
"""


def job_of(folder: Path, *changes: tuple[str, str], **options: Any) -> Job:
    """The job of the file with texts of it changed, and options beside it."""
    return batch_and_job(folder, *changes, **options)[1]


def batch_and_job(folder: Path, *changes: tuple[str, str], **options: Any) -> tuple[int | None, Job]:
    """The batch size too."""
    text = FILE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "train.toml"
    path.write_text(text, encoding="utf-8")
    job, batch, _ = make_job(str(path), options)  # type: ignore[arg-type]
    return batch, job


@pytest.mark.slow
def test_its_settings_are_a_job(tmp_path: Path) -> None:
    """Model, sequence, optimizer, clipping, recomputation and sharding are the file's, and the batch size."""
    batch, job = batch_and_job(tmp_path)
    assert (batch, job.samples.inputs[0].shape, dict(job.model.args)["num_hidden_layers"]) == (2, (1024,), 6)
    assert (job.loop.optimizer, job.loop.optimizer_impl) == (Optimizer.ADAMW, OptimizerImpl.FUSED)
    assert (job.loop.clip_gradients, job.loop.checkpoint, job.sharding.fsdp) == (
        ClipGradients.NORM,
        Checkpoint.BLOCKS,
        4,
    )
    assert job.sharding.fsdp_arg == FsdpArguments(
        by="torchtitan", reshard_after_forward=True, param_dtype="bf16", reduce_dtype="fp32"
    )


def test_the_number_of_gpus_is_the_users(tmp_path: Path) -> None:
    """-1 takes all, which torchrun knows."""
    all_gpus = ("data_parallel_shard_degree = 4", "data_parallel_shard_degree = -1")
    with pytest.raises(UsageError, match="it takes all GPUs; give their number, such as --fsdp 8"):
        job_of(tmp_path, all_gpus)
    assert job_of(tmp_path, all_gpus, fsdp=16).sharding.fsdp == 16


def test_replicas_and_accumulation_follow_from_degrees(tmp_path: Path) -> None:
    """Two groups of four ranks, and the global batch of 64 in four micro-batches of 2 on 8 ranks."""
    degrees = ("tensor_parallel_degree = 1", "data_parallel_replicate_degree = 2")
    job = job_of(tmp_path, degrees, ("seq_len", "global_batch_size = 64\nseq_len"))
    assert (job.sharding.fsdp, job.sharding.fsdp_arg.replicas, job.loop.accumulate) == (8, 2, 4)


def test_one_gpu_trains_under_autocast(tmp_path: Path) -> None:
    """Without FSDP torchtitan casts products alone."""
    job = job_of(tmp_path, ("data_parallel_shard_degree = 4", "data_parallel_shard_degree = 1"))
    assert (job.sharding.fsdp, job.loop.precision) == (0, Precision.AMP_BF16)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"full"', '"selective"', "activation_checkpoint.mode = 'selective' is not planned: some operators"),
        ('"debugmodel"', '"13B"', "model.flavor = '13B' is not planned: use one of 8B, 70B, 405B"),
        ('"llama3"', '"llama4"', "model.name = 'llama4' is not planned: use one of llama3"),
        ("tensor_parallel_degree = 1", "tensor_parallel_degree = 8", "name a FILE.py that splits the model"),
        ("tensor_parallel_degree = 1", "pipeline_parallel_degree = 2", "pipeline_parallel_degree = '2'"),
        ("tensor_parallel_degree = 1", "context_parallel_degree = 2", "context_parallel_degree = '2'"),
        ("enable = false\ncomp", "enable = true\ncomp", "compile.enable = 'True' is not planned"),
        ('"debugmodel"', '"debugmodel"\nconverters = ["float8"]', "model.converters .* float8 and MX change"),
        ("max_norm = 1.0", "enable_cpu_offload = true", "parameters would be on the CPU"),
        ("max_norm = 1.0", "global_batch_size = 9", "4 ranks of 2 samples do not divide it"),
        ("max_norm = 1.0", "seq_len = 0", "cannot be read"),
        ("max_norm = 1.0", "new_setting = 3", "training.new_setting = '3' is not planned: remove it"),
        ("[model]", "[models]", r"has no section \[model\]"),
    ],
)
def test_what_is_not_planned_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    """One line has the file, the key and what to do."""
    with pytest.raises(UsageError, match=f"train.toml.*{words}"):
        job_of(tmp_path, (old, new))


def test_options_beside_it_decide(tmp_path: Path) -> None:
    """What is refused in the file is planned where an option says how."""
    selective = ('"full"', '"selective"')
    assert job_of(tmp_path, selective, checkpoint="blocks").loop.checkpoint is Checkpoint.BLOCKS
    compiled = ("enable = false\ncomp", "enable = true\ncomp")
    assert job_of(tmp_path, compiled, compile="none").sharding.fsdp == 4


def test_a_missing_file_is_named() -> None:
    """The line says what to name."""
    with pytest.raises(UsageError, match="nowhere.toml: cannot be read: .*; name a TOML file of torchtitan"):
        make_job("nowhere.toml", {})
