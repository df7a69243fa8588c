"""Check a job against the table of refused combinations of options.

docs/limits.md repeats the table.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from planner.errors import UsageError
from planner.jobs.files.deepspeed import precision_agrees
from planner.jobs.job import (
    Checkpoint,
    ClipGradients,
    Compile,
    Job,
    Loss,
    Mode,
    Offload,
    Optimizer,
    OptimizerImpl,
    Quantize,
    Sharding,
)
from planner.jobs.parse import is_code, split_model
from planner.jobs.sizes import size_ranges
from planner.program import NEWEST_TORCH, format_torch_version, torch_version_of

RUN = "planner run emulates such a script"
_ONE_OF_TWO = f"remove one of the two, or {RUN}"
_AS_IN = f"is planned as in torch {format_torch_version(NEWEST_TORCH)} alone"


class Conflict(NamedTuple):
    """An option, and the options that are refused together with it."""

    option: str  # names of `SETTINGS`
    others: tuple[str, ...]
    reason: str = "is not planned"
    remedy: str = _ONE_OF_TWO


class Requirement(NamedTuple):
    """Options that have no effect without another option."""

    options: tuple[str, ...]
    needed: str
    remedy: str


# The settings that the tables name, and whether a job has each.
SETTINGS: Mapping[str, Callable[[Job], object]] = MappingProxyType(
    {
        "--accumulate": lambda job: job.loop.accumulate > 1,
        "--checkpoint": lambda job: job.loop.checkpoint is not Checkpoint.NONE,
        "--clip-gradients value": lambda job: job.loop.clip_gradients is ClipGradients.VALUE,
        "--compile": lambda job: job.model.compile is not Compile.NONE,
        "--compile reduce-overhead": lambda job: job.model.compile is Compile.REDUCE_OVERHEAD,
        "--dataset-size": lambda job: job.samples.dataset_size,
        "--ddp": lambda job: job.sharding.ddp,
        "--deepspeed": lambda job: job.sharding.deepspeed,
        "--ema": lambda job: job.loop.ema,
        "--eval-batch": lambda job: job.loop.eval_batch,
        "--eval-input": lambda job: job.loop.eval_input,
        "--freeze or --train-only": lambda job: job.model.freeze or job.model.train_only,
        "FILE.py:NAME": lambda job: split_model(job.model.origin).source == "file",
        "--fsdp": lambda job: job.sharding.fsdp,
        "--fsdp or --tp": lambda job: job.sharding.fsdp or job.sharding.tp,
        "--fsdp, --tp or --world-size": lambda job: job.sharding.ranks > 1,
        "--fsdp-arg": lambda job: job.sharding.fsdp_arg.non_default(),
        "--keep-grads": lambda job: job.loop.keep_grads,
        "--liger": lambda job: job.model.liger,
        "--loss FILE.py:NAME": lambda job: is_code(job.loop.loss),
        "--loss training_step": lambda job: job.loop.loss is Loss.TRAINING_STEP,
        "--mode generate": lambda job: job.loop.mode is Mode.GENERATE,
        "--mode other than train": lambda job: job.loop.mode is not Mode.TRAIN,
        "--mode step": lambda job: job.loop.mode is Mode.STEP,
        "--mode train or forward": lambda job: job.loop.mode in (Mode.TRAIN, Mode.FORWARD),
        "--new-tokens": lambda job: job.loop.new_tokens,
        "--offload": lambda job: job.loop.offload is not Offload.NONE,
        "--optimizer adagrad --optimizer-impl fused": lambda job: (
            job.loop.optimizer is Optimizer.ADAGRAD and job.loop.optimizer_impl is OptimizerImpl.FUSED
        ),
        "--peft": lambda job: job.model.peft,
        "--peft-arg": lambda job: job.model.peft_arg,
        "--precision other than the file's": lambda job: not precision_agrees(job),
        "--precision with a gradient scaler": lambda job: job.loop.grad_scaler,
        "--prepare-kbit": lambda job: job.model.prepare_kbit,
        "--quantize": lambda job: job.model.quantize is not Quantize.NONE,
        "--quantize int4-weight-only": lambda job: job.model.quantize is Quantize.INT4_WEIGHT_ONLY,
        "--quantize of torchao": lambda job: job.model.quantize.is_of_torchao,
        "--quantize-arg": lambda job: job.model.quantize_arg,
        "--rank": lambda job: job.sharding.rank,
        "--torch before 2.12": lambda job: torch_version_of(job.environment.torch) < (2, 12),
        "--torch of another version": lambda job: torch_version_of(job.environment.torch) != NEWEST_TORCH,
        "--tp": lambda job: job.sharding.tp,
        "--world-size": lambda job: job.sharding.world_size and not job.sharding.deepspeed,
        "samples of many sizes": size_ranges,
    }
)
# The text of a setting in a message, if it differs from the name.
_TEXTS: Mapping[str, Callable[[Job], str]] = MappingProxyType(
    {
        "--compile": lambda job: f"--compile {job.model.compile}",
        "--fsdp or --tp": lambda job: " ".join(
            f"{option} {ranks}"
            for option, ranks in (("--fsdp", job.sharding.fsdp), ("--tp", job.sharding.tp))
            if ranks
        ),
        "--mode other than train": lambda job: f"--mode {job.loop.mode}",
        "--mode step": lambda job: "a step of your own",
        "--mode train or forward": lambda job: f"--mode {job.loop.mode}",
        "--precision other than the file's": lambda job: f"--precision {job.loop.precision}",
        "--precision with a gradient scaler": lambda job: f"--precision {job.loop.precision}",
        "--quantize of torchao": lambda job: f"--quantize {job.model.quantize}",
        "--torch before 2.12": lambda job: f"--torch {job.environment.torch}",
        "--torch of another version": lambda job: f"--torch {job.environment.torch}",
        "--tp": lambda job: f"--tp {job.sharding.tp}",
        "--world-size": lambda job: f"--world-size {job.sharding.world_size}",
    }
)
_OF_RANKS = ("--ddp", "--compile", "--offload", "--quantize", "--ema", "--liger")
CONFLICTS = (
    Conflict("--compile", ("--mode generate", "--ddp", "--checkpoint")),
    Conflict("--compile", ("--offload",), "is not planned: the compiler decides what its graphs save"),
    Conflict(
        "--compile",
        ("--dataset-size",),
        "is not planned, since a smaller last batch is compiled again",
        "remove one of the two",
    ),
    Conflict(
        "--compile",
        ("--eval-batch", "--eval-input"),
        "is not planned, since torch compiles again, for any size, where batches of two sizes come",
        f"remove it, to evaluate at the training's size, or {RUN}",
    ),
    Conflict(
        "--compile",
        ("samples of many sizes",),
        "is not planned, since torch compiles again for them",
        "give the largest size alone",
    ),
    Conflict(
        "--compile reduce-overhead",
        ("--accumulate", "--keep-grads"),
        "fails in torch: CUDA graphs overwrite gradients that are kept from one forward pass to the next",
        "use --compile default",
    ),
    Conflict(
        "--compile",
        ("--torch of another version",),
        f"is not planned: compiled code {_AS_IN}",
        "remove --torch",
    ),
    Conflict(
        "--optimizer adagrad --optimizer-impl fused",
        ("--torch before 2.12",),
        "fails in torch: before 2.12 Adagrad is fused on the CPU alone",
        "use --optimizer-impl foreach",
    ),
    Conflict(
        "--eval-input",
        ("--loss training_step",),
        "is not planned: the batch of a training_step holds its targets too, whose sizes are not known",
        f"remove --eval-input, to evaluate at the training's size, or {RUN}",
    ),
    Conflict(
        "--mode step",
        ("--peft", "--quantize", "--liger"),
        "is not planned: the file makes its model by itself",
        "change the model there",
    ),
    Conflict(
        "--prepare-kbit",
        ("--quantize of torchao",),
        "fails: it prepares weights of bitsandbytes",
        "remove --prepare-kbit",
    ),
    Conflict(
        "--quantize int4-weight-only",
        ("--mode train or forward",),
        "fails in torchao: its products have no gradients",
        "add --mode infer, or take int8-weight-only",
    ),
    Conflict(
        "--world-size",
        ("--fsdp", "--tp"),
        "is not planned: the file shards its model by itself",
        "remove one of the two",
    ),
    Conflict(
        "--fsdp or --tp",
        ("--mode other than train", "--loss training_step"),
        "is not planned: a model is sharded in the planner's own training loop alone",
        RUN,
    ),
    Conflict("--fsdp or --tp", _OF_RANKS),
    Conflict("--tp", ("--peft", "--precision with a gradient scaler", "--freeze or --train-only")),
    Conflict(
        "--fsdp or --tp",
        ("--torch of another version",),
        f"is not planned: a rank {_AS_IN}",
        "remove --torch",
    ),
    Conflict(
        "--deepspeed",
        ("--mode other than train", "--loss training_step", "--loss FILE.py:NAME"),
        "is not planned: DeepSpeed trains in the planner's own loop with a named loss alone",
        RUN,
    ),
    Conflict("--deepspeed", ("--fsdp", "--tp", "--rank", *_OF_RANKS, "--peft")),
    Conflict("--deepspeed", ("--dataset-size", "--precision other than the file's")),
    Conflict("--deepspeed", ("--clip-gradients value", "--freeze or --train-only")),
    Conflict(
        "--deepspeed",
        ("--torch of another version",),
        f"is not planned: DeepSpeed {_AS_IN}",
        "remove --torch",
    ),
)
REQUIREMENTS = (
    Requirement(("--new-tokens",), "--mode generate", "remove it, or give --mode generate"),
    Requirement(("--fsdp-arg",), "--fsdp", "give the number of ranks, such as --fsdp 8"),
    Requirement(
        ("--world-size",),
        "FILE.py:NAME",
        "a file shards its model by itself; use --fsdp or --tp",
    ),
    Requirement(("--rank",), "--fsdp, --tp or --world-size", "give the number of ranks"),
    Requirement(("--peft-arg",), "--peft", "remove it, or name a method"),
    Requirement(("--prepare-kbit", "--quantize-arg"), "--quantize", "remove it, or give nf4 or int8"),
)


def check_conflicts(job: Job) -> None:
    """Raise UsageError if a job has a refused combination of options, or invalid numbers of ranks."""
    problem = _problem_of_ranks(job.sharding)
    if problem:
        raise UsageError(f"{job.model.name}: {problem}")
    for conflict in CONFLICTS:
        if not SETTINGS[conflict.option](job):
            continue
        other = next((name for name in conflict.others if SETTINGS[name](job)), None)
        if other is not None:
            both = f"{_text(conflict.option, job)} with {_text(other, job)}"
            raise UsageError(f"{job.model.name}: {both} {conflict.reason}; {conflict.remedy}")


def _problem_of_ranks(sharding: Sharding) -> str:
    """Return a message about the numbers of ranks if they are invalid, else ""."""
    ranks, shards, replicas = sharding.ranks, sharding.fsdp, sharding.fsdp_arg.replicas
    for option, count in (("--fsdp", shards), ("--tp", sharding.tp), ("--world-size", sharding.world_size)):
        if count == 1:
            return f"{option} 1: a model is sharded over two ranks or more"
    if sharding.deepspeed and not sharding.world_size:
        return "--deepspeed: give the number of ranks, two or more, such as --world-size 8"
    if sharding.rank >= ranks:
        return f"--rank {sharding.rank}: of {ranks} ranks give one from 0 to {ranks - 1}"
    if shards % replicas:
        return f"--fsdp-arg replicas={replicas}: {shards} ranks do not divide into so many groups"
    if replicas > 1 and replicas == shards:
        return f"--fsdp-arg replicas={replicas}: of {shards} ranks each would hold all; use --ddp"
    return ""


def check_requirements(job: Job) -> None:
    """Raise UsageError if an option is given without the option that it requires."""
    for requirement in REQUIREMENTS:
        given = next((name for name in requirement.options if SETTINGS[name](job)), None)
        if given is not None and not SETTINGS[requirement.needed](job):
            raise UsageError(f"{job.model.name}: {given} without {requirement.needed}: {requirement.remedy}")


def _text(name: str, job: Job) -> str:
    return _TEXTS[name](job) if name in _TEXTS else name
