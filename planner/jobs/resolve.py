"""From the user's words to a whole `Job`: the user's options over the entry's over those of the source."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

from planner.errors import UsageError
from planner.jobs.job import (
    CatalogueEntry,
    Checkpoint,
    ClipGradients,
    Job,
    Lengths,
    Loss,
    MemoryFormat,
    Mode,
    Optimizer,
    OptimizerImpl,
    Precision,
    TensorSpec,
    ZeroGrad,
    check_count,
    choose,
    is_code,
    nearest,
    parse_loss,
    parse_tensor_spec,
    shown,
    split_model,
)
from planner.jobs.nested import check_nesting
from planner.jobs.sample_inputs import find_sample
from planner.program import parse_workspace_config


class PlainOptions(TypedDict, total=False):
    """Options of a job that read the same wherever they are given; None counts as not set."""

    loss: str | None
    mode: str | None
    optimizer: str | None
    optimizer_impl: str | None
    zero_grad: str | None
    keep_grads: bool | None
    steps: int | None
    precision: str | None
    grad_scaler: bool | None
    backward_in_autocast: bool | None
    memory_format: str | None
    checkpoint: str | None
    accumulate: int | None
    clip_gradients: str | None
    ema: bool | None
    evaluate: bool | None
    eval_batch: int | None  # of the evaluation, by default that of the training
    ddp: bool | None
    ddp_bucket_view: bool | None
    new_tokens: int | None
    cudnn_benchmark: bool | None
    cudnn: str | None  # "installed" or a folder: that library is asked for its workspaces; or "published"
    cublas_workspace_config: str | None  # the text of CUBLAS_WORKSPACE_CONFIG


class JobOptions(PlainOptions, total=False):
    """What a user may set over the defaults, as the fields of `Job` mean it; None counts as not set."""

    model_args: Sequence[tuple[str, Any]] | None  # added to the defaults key by key
    inputs: Sequence[TensorSpec] | None
    target: TensorSpec | None
    targets: Sequence[TensorSpec] | None  # of a target that holds several tensors, in its place
    freeze: Sequence[str] | None
    train_only: Sequence[str] | None
    dataset_size: int | None
    lengths: str | None


PUBLISHED = "published"  # what --cudnn stands for where no library is asked
MAX_STEPS = 100
MAX_ACCUMULATE = 2**20
MAX_NEW_TOKENS = 2**20
MAX_EVAL_BATCH = 2**24  # as of the training's
MAX_SAMPLES = 2**50  # of a dataset

_TORCHVISION_FAMILIES = (
    r"(alexnet|convnext|densenet|efficientnet|googlenet|inception|maxvit|mnasnet|mobilenet|regnet|resnet|resnext"
    r"|shufflenet|squeezenet|swin_|vgg|vit_|wide_resnet)"
)
_ENUMERATIONS = {
    "mode": Mode,
    "optimizer": Optimizer,
    "optimizer_impl": OptimizerImpl,
    "zero_grad": ZeroGrad,
    "precision": Precision,
    "memory_format": MemoryFormat,
    "checkpoint": Checkpoint,
    "clip_gradients": ClipGradients,
    "lengths": Lengths,
}
COUNTS: Mapping[str, int] = MappingProxyType(
    {
        "steps": MAX_STEPS,
        "accumulate": MAX_ACCUMULATE,
        "new_tokens": MAX_NEW_TOKENS,
        "eval_batch": MAX_EVAL_BATCH,
        "dataset_size": MAX_SAMPLES,
    }
)  # options that are whole numbers from 1, and the most that they may be


def resolve_job(model: str, catalogue: Mapping[str, CatalogueEntry], **options: Unpack[JobOptions]) -> Job:
    """Complete a job. Raises `UsageError` for names that are unknown and options that make no sense."""
    if split_model(model).source:
        base = default_job(model, source="")
    elif model in catalogue:
        base = catalogue[model].job
    else:
        raise UsageError(_unknown_model(model, catalogue))
    job = merge_job(base, options)
    if job.loss in (Loss.SUM, Loss.OUTPUT) and (options.get("target") or options.get("targets")):
        raise UsageError(f"{model}: loss {job.loss} compares with no target; leave one of the two away")
    return complete_job(job)


def default_job(model: str, source: str) -> Job:
    """The job of a model under the defaults of its source, which may leave its inputs empty."""
    job = Job(model=model, source=source)
    if _is_of(job, "hf"):
        return replace(job, loss=Loss.OUTPUT)
    sample = find_sample(source or model)
    if sample is None:
        return replace(job, target=parse_tensor_spec("scalar:int64") if _is_of(job, "timm") else None)
    return replace(
        job,
        inputs=tuple(map(parse_tensor_spec, sample.inputs)),
        target=None if sample.target is None else parse_tensor_spec(sample.target),
        loss=sample.loss,
        model_args=sample.model_args,
    )


def is_completed_by_library(job: Job) -> bool:
    """Whether the inputs of the job's model are told by its library, so that they may be missing here."""
    return _is_of(job, "hf") or _is_of(job, "timm")


def _is_of(job: Job, source: str) -> bool:
    return split_model(job.source or job.model).source == source


def merge_job(base: Job, options: Mapping[str, Any]) -> Job:
    """Put options over a job; enumerations may be given by their value."""
    given = {name: value for name, value in options.items() if value not in (None, (), [])}
    for name, kind in _ENUMERATIONS.items():
        if name in given:
            given[name] = choose(kind, given[name], "--" + name.replace("_", "-"))
    if "loss" in given:
        given["loss"] = parse_loss(given["loss"])
    if "model_args" in given:
        given["model_args"] = tuple((dict(base.model_args) | dict(given["model_args"])).items())
    if "precision" in given:
        given.setdefault("grad_scaler", given["precision"] is Precision.AMP_FP16)
    if given.get("eval_batch"):
        given["evaluate"] = True
    if given.get("ddp_bucket_view"):
        given.setdefault("ddp", True)
    if "optimizer" in given and base.optimizer_impl is default_impl(base.optimizer):
        given.setdefault("optimizer_impl", default_impl(given["optimizer"]))
    if "targets" in given:
        given["target"] = None
    elif "target" in given:
        given["targets"] = ()
    for name in ("inputs", "targets", "freeze", "train_only"):
        if name in given:
            given[name] = tuple(given[name])
    if given.get("loss") in (Loss.SUM, Loss.OUTPUT):
        given.setdefault("targets", ())
        given.setdefault("target", None)  # such a loss compares with none
    if "inputs" in given and "target" not in given:
        given["target"] = _resized(base, given["inputs"])
    for name, most in COUNTS.items():
        if name in given:
            check_count("--" + name.replace("_", "-"), given[name], most)
    if given.get("cudnn") == PUBLISHED:
        given["cudnn"] = ""
    if given.get("cublas_workspace_config"):
        parse_workspace_config(given["cublas_workspace_config"])
    return replace(base, **given)


def _resized(base: Job, inputs: Sequence[TensorSpec]) -> TensorSpec | None:
    """The target of a job whose inputs are given anew: a map as large as the input stays so."""
    if base.target is None or not base.inputs:
        return base.target
    target, old, new = base.target.shape, base.inputs[0].shape, inputs[0].shape
    rank = next((n for n in (3, 2) if len(old) > n and len(new) == len(old) and target[-n:] == old[-n:]), 0)
    return replace(base.target, shape=(*target[:-rank], *new[-rank:])) if rank else base.target


def default_impl(optimizer: Optimizer) -> OptimizerImpl:
    """What torch takes on CUDA unless told otherwise: all parameters at once, but Adafactor one by one, which
    is chosen where memory is short (torch/optim/_adafactor.py).
    """
    return OptimizerImpl.FOR_LOOP if optimizer is Optimizer.ADAFACTOR else OptimizerImpl.FOREACH


def complete_job(job: Job) -> Job:
    """Check that nothing is missing and settle what depends on several options."""
    if job.mode is Mode.GENERATE and not job.new_tokens:
        raise UsageError(
            f"{job.model}: how many tokens to generate is unknown; give --new-tokens, such as 128"
        )
    if job.mode is not Mode.GENERATE and job.new_tokens:
        raise UsageError(
            f"{job.model}: --new-tokens and --mode {job.mode}: leave it away, or give --mode generate"
        )
    least = 3 if job.evaluate or job.mode is Mode.FORWARD else 2
    if job.dataset_size and job.steps < least:
        raise UsageError(
            f"{job.model}: --dataset-size and --steps {job.steps}: the smaller batch comes between others; "
            f"give at least --steps {least}"
        )
    if not job.inputs and not is_completed_by_library(job):
        raise UsageError(f"{job.model}: its inputs are unknown; give one sample, such as --input 3x224x224")
    check_nesting(job)
    if job.mode is not Mode.TRAIN or job.loss in (Loss.SUM, Loss.OUTPUT):
        return replace(job, target=None, targets=())
    if is_code(job.loss):  # whether it takes a target shows when its file is run
        return job
    if job.targets:
        raise UsageError(
            f"{job.model}: loss {job.loss} compares with one tensor, not with {job.targets[0]}; give one "
            "target without a name, or name a loss of your own: --loss FILE.py:NAME"
        )
    if job.target is None or (job.loss is not Loss.CROSS_ENTROPY and "int" in job.target.dtype):
        example = "scalar:int64" if job.loss is Loss.CROSS_ENTROPY else "1000 (floats, shaped as the output)"
        raise UsageError(
            f"{job.model}: loss {job.loss} needs a target; give one sample, such as --target {example}"
        )
    return job


def _unknown_model(model: str, catalogue: Iterable[str]) -> str:
    names = list(catalogue)
    near = nearest(model, names)
    told = f"the nearest in the catalogue: {near}" if near else f"the catalogue has {', '.join(names)}"
    if re.match(_TORCHVISION_FAMILIES, model):
        return f"model {shown(model)} is unknown; {told}; torchvision's own is written torchvision:{model}"
    others = "others are written SOURCE:NAME or FILE.py:NAME"
    if "/" in model or "-" in model:  # as names on a hub are
        others += "; nothing is fetched from a hub: save config.json into a folder and name hf:FOLDER"
    return f"model {shown(model)} is unknown; {told}; {others}"
