"""Choose the parameters to train by `--freeze` and `--train-only`."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from planner.errors import UsageError
from planner.jobs import Job, Mode, nearest, shown


def freeze_parameters(model: nn.Module, job: Job) -> None:
    """Set `requires_grad` of parameters by the job's `train_only` and `freeze` patterns.

    With `train_only`, exactly the floating-point parameters that match are trained, as by a script's loop
    over `named_parameters`. Then `freeze` freezes the parameters that match. A parameter that the model uses
    under several names matches by any of them.

    Raises UsageError for a pattern that matches no parameter, and if no parameter is left to train.
    """
    if not job.model.freeze and not job.model.train_only:
        return
    named = list(model.named_parameters(remove_duplicate=False))
    names = [name for name, _ in named]
    _refuse_unmatched("--train-only", job.model.train_only, names, job.model.name)
    _refuse_unmatched("--freeze", job.model.freeze, names, job.model.name)
    if job.model.train_only:
        for _, parameter in named:
            parameter.requires_grad_(False)
        for name, parameter in named:
            if _matches(name, job.model.train_only) and parameter.is_floating_point():
                parameter.requires_grad_(True)
    for name, parameter in named:
        if _matches(name, job.model.freeze):
            parameter.requires_grad_(False)
    if job.loop.mode is Mode.TRAIN and not any(parameter.requires_grad for _, parameter in named):
        option = "--freeze" if job.model.freeze else "--train-only"
        raise UsageError(f"{option}: no parameter of {job.model.name} is left to train; use fewer patterns")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_unmatched(option: str, patterns: Iterable[str], names: list[str], model: str) -> None:
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        near = nearest(pattern, names) or ", ".join(names[:3])
        hint = f"some are {near}" if near else "it has none"
        raise UsageError(f"{option} {shown(pattern)}: no parameter of {model} has such a name; {hint}")
