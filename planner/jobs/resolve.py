"""Resolve a job from the user's options, the catalogue's entry and the defaults of the source."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from planner._support.bounded_read import LARGEST_CODE_BYTES, read_text
from planner.errors import UsageError
from planner.jobs.conflicts import check_conflicts, check_requirements
from planner.jobs.job import (
    CatalogueEntry,
    ClipGradients,
    Job,
    Loss,
    Mode,
    Optimizer,
    OptimizerImpl,
    Precision,
    TensorSpec,
    ZeroGrad,
)
from planner.jobs.nested import check_nesting
from planner.jobs.options import FIELD_OPTIONS
from planner.jobs.own_code import CodeKind, check_code, kind_of_code, sets_cudnn_benchmark
from planner.jobs.parse import is_code, nearest, parse_tensor_spec, shown, split_model
from planner.jobs.sample_inputs import find_sample

# MONAI 1.6 sets CUBLAS_WORKSPACE_CONFIG to this on import (monai/utils/misc.py); 1.5 did not.
MONAI_CUBLAS_CONFIG = ":4096:8"
_TORCHVISION_FAMILIES = (
    r"(alexnet|convnext|densenet|efficientnet|googlenet|inception|maxvit|mnasnet|mobilenet|regnet|resnet|resnext"
    r"|shufflenet|squeezenet|swin_|vgg|vit_|wide_resnet)"
)


def resolve_job(model: str, catalogue: Mapping[str, CatalogueEntry], **options: Any) -> Job:
    """Return the complete job of a model with options named as in `JOB_FIELDS`. Raises UsageError."""
    if split_model(model).source:
        base = default_job(model, source="", given=[name for name, _ in options.get("model_args") or ()])
    elif model in catalogue:
        base = catalogue[model].job
    else:
        raise UsageError(_unknown_model(model, catalogue))
    job = merge_job(base, options)
    if job.loop.loss in (Loss.SUM, Loss.OUTPUT) and (options.get("target") or options.get("targets")):
        raise UsageError(f"{model}: loss {job.loop.loss} compares with no target; remove one of the two")
    return complete_job(job)


def default_job(model: str, source: str, given: Collection[str] = ()) -> Job:
    """Return the job of a model with the defaults of its source.

    The job's inputs may be empty. `given` are the names of the arguments for its constructor.
    """
    job = Job.create(model=model, source=source)
    if _is_of(job, "file"):
        job = job.replace(**defaults_of_code(split_model(source or model).name, given))
    if _imports_monai(source or model):
        job = job.replace(cublas_workspace_config=MONAI_CUBLAS_CONFIG)
    if _is_of(job, "hf"):
        return job.replace(loss=Loss.OUTPUT)
    if _is_of(job, "diffusers"):
        return job.replace(loss=Loss.MSE)
    if _is_of(job, "nnunet"):  # nnUNetTrainer's recipe
        job = job.replace(loss=Loss.OUTPUT, optimizer=Optimizer.NESTEROV, clip_gradients=ClipGradients.NORM)
        return job.replace(precision=Precision.AMP_FP16, grad_scaler=True)
    sample = find_sample(source or model)
    if sample is None:
        return job.replace(target=parse_tensor_spec("scalar:int64") if _is_of(job, "timm") else None)
    return job.replace(
        inputs=tuple(map(parse_tensor_spec, sample.inputs)),
        target=None if sample.target is None else parse_tensor_spec(sample.target),
        loss=sample.loss,
        model_args=sample.model_args,
    )


def defaults_of_code(name: str, given: Collection[str]) -> dict[str, Any]:
    """Return the fields of a job, such as the mode, that follow from the code of FILE.py:NAME.

    `given` are the names of the arguments that FILE.py:NAME is called with.
    """
    kind = kind_of_code(name, given)
    if kind in (CodeKind.STEP, CodeKind.STEP_FUNCTION):
        return {"mode": Mode.STEP, "cudnn_benchmark": sets_cudnn_benchmark(name)}
    if kind is CodeKind.LIGHTNING:  # lightning/pytorch/loops/optimization/automatic.py
        return {"loss": Loss.TRAINING_STEP, "zero_grad": ZeroGrad.BEFORE_BACKWARD}
    return {}


def _imports_monai(model: str) -> bool:
    """Return whether a model is from MONAI or from a file that imports MONAI."""
    source, name = split_model(model)
    if source != "file":
        return source == "monai"
    path = Path(name.rpartition(":")[0])
    try:  # an unreadable file is refused when it is run
        code = read_text(path, LARGEST_CODE_BYTES, errors="replace")
    except OSError:
        return False
    return re.search(r"^\s*(?:import|from)\s+monai\b", code, re.MULTILINE) is not None


def trains_itself(job: Job) -> bool:
    """Return whether the model's code runs the training step, or provides the loss and the optimizer."""
    return job.loop.mode is Mode.STEP or (job.loop.mode is Mode.TRAIN and job.loop.loss is Loss.TRAINING_STEP)


def is_completed_by_library(job: Job) -> bool:
    """Return whether the model's library supplies the inputs, so that a job may lack them."""
    return any(_is_of(job, source) for source in ("hf", "timm", "diffusers", "nnunet"))


def _is_of(job: Job, source: str) -> bool:
    return split_model(job.model.origin).source == source


def merge_job(base: Job, options: Mapping[str, Any]) -> Job:
    """Return `base` with given options, named as in `JOB_FIELDS`, and the settings that they imply.

    None and empty lists count as not given. Raises UsageError for an invalid value, and for an option of
    training together with a mode that does not train.
    """
    given = {name: value for name, value in options.items() if value not in (None, (), [])}
    given |= {name: option.read(given[name]) for name, option in FIELD_OPTIONS.items() if name in given}
    if "model_args" in given:
        given["model_args"] = tuple((dict(base.model.args) | dict(given["model_args"])).items())
    if "optimizer_args" in given:
        kept = (
            {}
            if given.get("optimizer", base.loop.optimizer) != base.loop.optimizer
            else dict(base.loop.optimizer_args)
        )
        given["optimizer_args"] = tuple((kept | dict(given["optimizer_args"])).items())
    elif given.get("optimizer", base.loop.optimizer) != base.loop.optimizer:
        given["optimizer_args"] = ()  # they belong to another optimizer
    if given.get("mode", Mode.TRAIN) not in (Mode.TRAIN, Mode.STEP):
        base = _without_training(base, given)
    elif "precision" in given and base.loop.mode in (Mode.TRAIN, Mode.STEP):
        given.setdefault("grad_scaler", given["precision"] is Precision.AMP_FP16)
    if given.get("eval_batch") or given.get("eval_input"):
        given["evaluate"] = True
    if given.get("ddp_bucket_view"):
        given.setdefault("ddp", True)
    if "optimizer" in given and base.loop.optimizer_impl is default_impl(base.loop.optimizer):
        given.setdefault("optimizer_impl", default_impl(given["optimizer"]))
    if "targets" in given:
        given["target"] = None
    elif "target" in given:
        given["targets"] = ()
    given |= {name: tuple(given[name]) for name in ("inputs", "targets") if name in given}
    target = given.get("target")
    if target is not None and "int" in target.dtype and base.loop.loss is Loss.BCE_WITH_LOGITS:
        given.setdefault("loss", Loss.CROSS_ENTROPY)  # numbers of classes
    if given.get("loss") in (Loss.SUM, Loss.OUTPUT):
        given.setdefault("targets", ())
        given.setdefault("target", None)  # such a loss has no target
    if "inputs" in given and "target" not in given:
        given["target"] = _resized(base, given["inputs"])
    return base.replace(**given)


def evaluated_job(job: Job) -> Job:
    """Return the job with the evaluation's inputs, if given, and a target resized for these inputs."""
    if not job.loop.eval_input:
        return job
    inputs = tuple(map(parse_tensor_spec, job.loop.eval_input))
    return job.replace(inputs=inputs, target=_resized(job, inputs))


def check_evaluated(job: Job) -> None:
    """Raise UsageError if the evaluation's inputs differ from the training's in number, name or dtype."""
    given = [(spec.keyword, spec.dtype) for spec in map(parse_tensor_spec, job.loop.eval_input)]
    if given and given != [(spec.keyword, spec.dtype) for spec in job.samples.inputs]:
        expected = ", ".join(map(str, job.samples.inputs))
        raise UsageError(
            f"--eval-input {', '.join(job.loop.eval_input)}: {job.model.name} takes {expected}; give the "
            "same inputs, of other sizes"
        )


def _resized(base: Job, inputs: Sequence[TensorSpec]) -> TensorSpec | None:
    """Return a job's target or None for new inputs, resized if it had the first input's spatial size."""
    if base.samples.target is None or not base.samples.inputs:
        return base.samples.target
    target, old, new = base.samples.target.shape, base.samples.inputs[0].shape, inputs[0].shape
    rank = next((n for n in (3, 2) if len(old) > n and len(new) == len(old) and target[-n:] == old[-n:]), 0)
    if not rank:
        return base.samples.target
    smallest = inputs[0].smallest
    return replace(
        base.samples.target,
        shape=(*target[:-rank], *new[-rank:]),
        smallest=(*target[:-rank], *smallest[-rank:]) if smallest else (),
    )


def default_impl(optimizer: Optimizer | str) -> OptimizerImpl:
    """Return torch's default implementation of an optimizer on CUDA: for-loop for Adafactor, else foreach.

    Adafactor is chosen to save memory (torch/optim/_adafactor.py).
    """
    return OptimizerImpl.FOR_LOOP if optimizer is Optimizer.ADAFACTOR else OptimizerImpl.FOREACH


def complete_job(job: Job) -> Job:
    """Check a job, and return it without unused targets.

    The mode and the loss decide whether targets are used. The targets of a `training_step` are moved to the
    inputs. Raises UsageError if the job is incomplete or not planned.
    """
    if job.loop.mode is Mode.GENERATE and not job.loop.new_tokens:
        raise UsageError(
            f"{job.model.name}: how many tokens to generate is unknown; give --new-tokens, such as 128"
        )
    least = 3 if job.loop.evaluate or job.loop.mode is Mode.FORWARD else 2
    if job.samples.dataset_size and job.loop.steps < least:
        raise UsageError(
            f"{job.model.name}: --dataset-size and --steps {job.loop.steps}: the smaller batch comes between "
            f"others; give at least --steps {least}"
        )
    if not job.samples.inputs and not is_completed_by_library(job) and job.loop.mode is not Mode.STEP:
        _check_own_code(job)
        raise UsageError(
            f"{job.model.name}: its inputs are unknown; give one sample, such as {_example_of(job)}"
        )
    if job.loop.mode is Mode.STEP:
        _refuse_changed(job, _OF_THE_LOOP, "its own training step")
    if job.loop.loss is Loss.TRAINING_STEP and job.loop.mode is Mode.TRAIN:
        _refuse_changed(job, ("optimizer", "optimizer_impl"), "configure_optimizers of the model")
        # The targets are part of the batch, from which the model computes its loss.
        job = job.replace(inputs=(*job.samples.inputs, *_targets_of(job)), target=None, targets=())
    check_nesting(job)
    check_requirements(job)
    check_conflicts(job)
    if not is_completed_by_library(job):
        check_evaluated(job)
    if job.loop.mode is Mode.STEP:
        return job
    if job.loop.mode is not Mode.TRAIN or job.loop.loss in (Loss.SUM, Loss.OUTPUT, Loss.TRAINING_STEP):
        return job.replace(target=None, targets=())
    if is_code(job.loop.loss):  # whether it takes a target is known when its file is run
        return job
    if job.samples.targets:
        raise UsageError(
            f"{job.model.name}: loss {job.loop.loss} compares with one tensor, not with "
            f"{job.samples.targets[0]}; give one "
            "target without a name, or name a loss of your own: --loss FILE.py:NAME"
        )
    if job.samples.target is None and job.loop.loss is Loss.MSE and _is_of(job, "diffusers"):
        return job  # its library knows the shape of the output
    if (
        job.samples.target is not None
        and job.loop.loss is not Loss.CROSS_ENTROPY
        and "int" in job.samples.target.dtype
    ):
        raise UsageError(
            f"{job.model.name}: loss {job.loop.loss} compares with floats, and the target "
            f"{job.samples.target} has integers; "
            "give floats, shaped as the output, such as --target 1000, or the loss of classes: --loss "
            "cross_entropy"
        )
    if job.samples.target is None:
        _check_own_code(job)
        example = (
            "scalar:int64" if job.loop.loss is Loss.CROSS_ENTROPY else "1000 (floats, shaped as the output)"
        )
        problem = f"{job.model.name}: loss {job.loop.loss} needs a target"
        if _returns_its_loss(job):
            raise UsageError(f"{problem}; for the model's own loss, give its labels: {_example_of(job)}")
        raise UsageError(f"{problem}; give one sample, such as --target {example}")
    return job


def _example_of(job: Job) -> str:
    """Return options, as text for a message, that may describe one sample of a user's model."""
    if _returns_its_loss(job):
        return "--input input_ids=512:int64 --input labels=512:int64 --loss output"
    return "--input 3x224x224"


def _returns_its_loss(job: Job) -> bool:
    """Return whether a user's file, by its source, creates a model of transformers."""
    name = split_model(job.model.origin).name
    return _is_of(job, "file") and kind_of_code(name, dict(job.model.args)) is CodeKind.TRANSFORMERS


def _check_own_code(job: Job) -> None:
    """Raise UsageError if a job's FILE.py:NAME does not exist, or trains but has no `forward`.

    Models that are not from a file are not checked.
    """
    if _is_of(job, "file"):
        check_code(split_model(job.model.origin).name)


def _targets_of(job: Job) -> tuple[TensorSpec, ...]:
    return job.samples.targets if job.samples.target is None else (job.samples.target,)


# The options that a user's own training step decides.
_OF_THE_LOOP = (
    *("loss", "optimizer", "optimizer_impl", "zero_grad", "keep_grads", "drop_output", "precision"),
    *("grad_scaler", "backward_in_autocast", "memory_format", "checkpoint", "offload", "accumulate"),
    *("clip_gradients", "ema", "evaluate", "eval_batch", "eval_input", "ddp", "ddp_bucket_view", "freeze"),
    "train_only",
)


# The options that have an effect in training alone.
_OF_TRAINING = (
    *("zero_grad", "keep_grads", "grad_scaler", "backward_in_autocast", "offload", "accumulate"),
    *("clip_gradients", "ema", "evaluate", "eval_batch", "eval_input", "ddp", "ddp_bucket_view"),
)


def _without_training(base: Job, given: Mapping[str, Any]) -> Job:
    """Return `base` with the defaults of options that have an effect in training alone.

    Raises UsageError if such an option is given.
    """
    default_job = Job.create("")
    defaults = {name: default_job.value(name) for name in _OF_TRAINING}
    for name, default in defaults.items():
        if given.get(name, default) != default:
            problem = f"{FIELD_OPTIONS[name].flag} with --mode {given['mode']}"
            raise UsageError(
                f"{base.model.name}: {problem} has no effect, since nothing is trained; remove it"
            )
    return base.replace(**defaults)


def _refuse_changed(job: Job, names: Sequence[str], what: str) -> None:
    """Raise UsageError if an option in `names`, which the model's code decides, differs from its default."""
    for name in names:
        if not job.has_default(name):
            raise UsageError(f"{FIELD_OPTIONS[name].flag}: {job.model.name}: {what} decides that; remove it")


def _unknown_model(model: str, catalogue: Iterable[str]) -> str:
    names = list(catalogue)
    near = nearest(model, names)
    hint = f"the nearest in the catalogue: {near}" if near else f"the catalogue has {', '.join(names)}"
    if re.match(_TORCHVISION_FAMILIES, model):
        return f"model {shown(model)} is unknown; {hint}; torchvision's own is written torchvision:{model}"
    others = "others are written SOURCE:NAME or FILE.py:NAME"
    if "/" in model or "-" in model:  # like names on a hub
        others += "; nothing is fetched from a hub: save config.json into a folder and name hf:FOLDER"
    return f"model {shown(model)} is unknown; {hint}; {others}"
