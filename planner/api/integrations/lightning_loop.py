"""Convert a Lightning trainer, its module and its data to a job's loop."""

import warnings
from collections.abc import Sequence
from dataclasses import replace as replaced
from math import prod
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from planner.api.integrations import accelerate_settings, lightning_settings
from planner.api.integrations.lightning_package import (
    is_overridden,
    is_param_in_hook_signature,
    isolate_rng,
    parsing,
)
from planner.api.integrations.live_model import LiveLoop
from planner.api.integrations.settings import COMPILED, look_up, notes_of
from planner.api.integrations.trainer_view import TrainerView
from planner.capture import LiveEvaluation, fields_of_optimizer, notes_of_optimizer, read_optimizer
from planner.errors import UsageError, reason_of
from planner.jobs import ClipGradients, Precision, ZeroGrad

_PRECISIONS = {
    "32-true": Precision.FP32,
    "16-mixed": Precision.AMP_FP16,
    "bf16-mixed": Precision.AMP_BF16,
    "16-true": Precision.FP16,
    "bf16-true": Precision.BF16,
}

# lightning/pytorch/utilities/compile.py sets them on a module that was given to torch.compile.
_COMPILED_METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def loop_of_trainer(trainer: Any, module: Any, sample: Any, batch_name: str = "batch_size") -> LiveLoop:
    """Return the training loop of a Lightning trainer as a `LiveLoop`.

    `sample` is a batch, by default the first of the training data; `batch_name` is the attribute of the
    module or its data module with the batch size. Raises UsageError for a setting that is refused.
    """
    if not module.automatic_optimization:
        raise UsageError(
            "manual optimization is not planned here; name the module's file: planner max-batch --model "
            "FILE.py:NAME"
        )
    unplanned = (*notes_of_trainer(trainer), *notes_of_module(module))
    if len(trainer.optimizers) != 1:
        raise UsageError(f"{len(trainer.optimizers)} optimizers are configured; plans are made for one")
    (optimizer,) = trainer.optimizers
    live = read_optimizer(optimizer, module)
    view = TrainerView(trainer)

    def prepare(copied: Any) -> None:
        copied.trainer = view
        if module._compiler_ctx is not None:  # compiled methods are bound to the original
            for name in _COMPILED_METHODS:
                copied.__dict__.pop(name, None)

    fields = {**fields_of_trainer(trainer), **fields_of_optimizer(optimizer)}
    fields["evaluate"] = validates(trainer, module)
    evaluation = None
    if fields["evaluate"]:
        evaluation, said = _validation(trainer, module, batch_name)
        fields["eval_batch"] = 0 if evaluation is None else evaluation.batch
        unplanned += () if evaluation is not None else said
    return LiveLoop(
        module,
        _batch(trainer, module) if sample is None else sample,
        _step_of(trainer, module, "training_step"),
        fields,
        unplanned,
        (*notes_of_optimizer(live), *(said if evaluation is not None else ())),
        [(trainer, view), (module._fabric, None)],
        live,
        prepare,
        evaluation=evaluation,
    )


def without_validation_data(loop: LiveLoop, reason: str) -> LiveLoop:
    """Return the loop with validation planned as training steps without gradients, and a note on why."""
    fields = {**loop.fields, "eval_batch": 0}
    return replace(loop, evaluation=None, fields=fields, unplanned=(*loop.unplanned, _as_training(reason)))


def _as_training(reason: str) -> str:
    return (
        "validation is planned as training steps without gradients, on batches of the training's shapes, and "
        f"may take more: {reason}"
    )


def _validation(trainer: Any, module: Any, batch_name: str) -> tuple[LiveEvaluation | None, tuple[str, ...]]:
    """Return the validation step with the largest batches (None if the data raises an error), and a note."""
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    try:
        loaders = _loaders(source.dataloader())
        each = [_validation_of(trainer, module, loaders, index) for index in range(len(loaders))]
        index = max(range(len(loaders)), key=lambda index: _elements(each[index]))
        size = each[index].batch
        follows = size == parsing.lightning_getattr(module, batch_name) and _follows(
            source, module, batch_name, size, index
        )
        evaluation = replaced(each[index], batch=0) if follows else each[index]
        shapes = ", ".join(map(str, evaluation.inputs()))
    except Exception as error:  # errors of the user's data
        return None, (_as_training(reason_of(error)),)
    batches = "as many samples as the training's" if follows else f"{size:,} samples"
    loader = f", of loader {index} of its {len(loaders)}, which has the largest" if len(loaders) > 1 else ""
    return evaluation, (f"validation is planned by its own step, on batches of {batches}: {shapes}{loader}",)


def _loaders(loaders: Any) -> list[Any]:
    """Return the data loaders in nested lists, tuples and dictionaries, as a flat list in order."""
    if not isinstance(loaders, list | tuple | dict):
        return [loaders]
    several = loaders.values() if isinstance(loaders, dict) else loaders
    return [one for each in several for one in _loaders(each)]


def _validation_of(trainer: Any, module: Any, loaders: Sequence[Any], index: int) -> LiveEvaluation:
    """Return the validation step on the loader at `index`, with the loader's first batch and batch size."""
    sample = _first_batch(trainer, module, loaders[index])
    indices = (0, index) if len(loaders) > 1 else (0,)
    step = _step_of(trainer, module, "validation_step", indices)
    return LiveEvaluation(sample, step, int(loaders[index].batch_size))


def _elements(evaluation: LiveEvaluation) -> int:
    return evaluation.batch * sum(prod(spec.shape) for spec in evaluation.inputs())


def _follows(source: Any, module: Any, name: str, size: int, index: int) -> bool:
    """Return whether the batch size of the loader at `index` changes with the module's attribute `name`.

    The attribute is changed to find out, and restored to `size`.
    """
    parsing.lightning_setattr(module, name, size + 1)
    try:
        return int(_loaders(source.dataloader())[index].batch_size) == size + 1
    finally:
        parsing.lightning_setattr(module, name, size)


def _batch(trainer: Any, module: Any) -> Any:
    """Return the first batch of the training data, after the hook `on_before_batch_transfer`."""
    return _first_batch(trainer, module, trainer.fit_loop._data_source.dataloader())


def _first_batch(trainer: Any, module: Any, loader: Any) -> Any:
    with isolate_rng(include_cuda=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = next(iter(loader))
        return _data_hooks(trainer, module, "on_before_batch_transfer")(batch, 0)


def _data_hooks(trainer: Any, module: Any, name: str) -> Any:
    """Return the hook `name` of the data module or, if it does not override the hook, of the module."""
    selector = trainer._data_connector._datahook_selector
    return getattr(module if selector is None else selector.get_instance(name), name)


def _step_of(trainer: Any, module: Any, method: str, indices: tuple[int, ...] = (0,)) -> Any:
    """Return a function that runs `method` of a copy of the module on a batch.

    The function takes the copy and the batch. The hook `on_after_batch_transfer` runs first. `indices` are
    the index of the batch and, if there are several loaders, the index of its loader.
    """
    name = "on_after_batch_transfer"
    transfer = _data_hooks(trainer, module, name)
    is_own = getattr(transfer, "__self__", None) is module
    takes_index = is_param_in_hook_signature(getattr(module, method), "batch_idx", min_args=2)

    def step(copied: Any, batch: Any) -> Any:
        batch = (getattr(copied, name) if is_own else transfer)(batch, indices[-1] if indices[1:] else 0)
        return getattr(copied, method)(*((batch, *indices) if takes_index else (batch,)))

    return step


def validates(trainer: Any, module: Any) -> bool:
    """Return whether the trainer validates between training steps."""
    if trainer.limit_val_batches == 0 or not is_overridden("validation_step", module):
        return False
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    return bool(source.is_defined())


def fields_of_trainer(trainer: Any) -> dict[str, Any]:
    """Convert a trainer to a job's fields. Raises UsageError for a precision that is not planned."""
    name = str(trainer.precision)
    precision = look_up(_PRECISIONS, name, "precision")
    clip = ClipGradients.NONE
    if trainer.gradient_clip_val:
        by_value = str(trainer.gradient_clip_algorithm or "norm") == "value"
        clip = ClipGradients.VALUE if by_value else ClipGradients.NORM
    ddp = lightning_settings.strategy_name(trainer) == "DDPStrategy"
    views = ddp and bool(trainer.strategy._ddp_kwargs.get("gradient_as_bucket_view"))
    return {
        "precision": precision,
        "grad_scaler": name == "16-mixed",
        "zero_grad": ZeroGrad.BEFORE_BACKWARD,  # lightning/pytorch/loops/optimization/automatic.py
        "accumulate": _accumulation(trainer),
        "clip_gradients": clip,
        "ema": any(map(lightning_settings.averages_on_gpu, _of_class(trainer, "WeightAveraging"))),
        "ddp": ddp,
        "ddp_bucket_view": views,
    }


def _accumulation(trainer: Any) -> int:
    """Return the largest number of micro-batches per optimizer step in any epoch."""
    schedules = [callback.scheduling for callback in _of_class(trainer, "GradientAccumulationScheduler")]
    steps = [max(schedule.values()) for schedule in schedules]
    return int(max([trainer.accumulate_grad_batches, *steps]))


def _of_class(trainer: Any, name: str) -> list[Any]:
    return [one for one in trainer.callbacks if name in [kind.__name__ for kind in type(one).__mro__]]


def notes_of_trainer(trainer: Any) -> tuple[str, ...]:
    """Return a note for each setting of a trainer that is in use and not planned.

    Raises UsageError for refused settings.
    """
    notes = list(notes_of(lightning_settings.SHARDED, trainer, "Trainer: strategy"))
    notes += notes_of(lightning_settings.TRAINER, trainer, "Trainer")
    for callback in trainer.callbacks:
        notes += _notes_of_callback(callback)
    kind = type(trainer.precision_plugin).__name__
    if kind not in lightning_settings.PRECISION_PLUGINS and str(trainer.precision) in _PRECISIONS:
        raise UsageError(f"Trainer: plugins: {kind} is not planned; remove it, or plan by hand")
    if lightning_settings.strategy_name(trainer) == "DDPStrategy":
        strategy = trainer.strategy
        defaults = {"bucket_cap_mb": None, "comm_wrapper": "no"}
        hook = {"comm_hook": strategy._ddp_comm_hook or "no"}
        given = SimpleNamespace(**{**defaults, **strategy._ddp_kwargs, **hook})
        notes += notes_of(accelerate_settings.DDP, given, "DDPStrategy")
    for scheduler in _of_class(trainer, "GradientAccumulationScheduler"):
        notes.append(
            f"GradientAccumulationScheduler: planned for the most micro-batches of its schedule, "
            f"{max(scheduler.scheduling.values())}"
        )
    averages = len(_of_class(trainer, "WeightAveraging"))
    if averages > 1:
        notes.append(f"{averages} weight averages are in use; one is counted")
    return tuple(dict.fromkeys(notes))


def _notes_of_callback(callback: Any) -> tuple[str, ...]:
    """Return the note of the table `CALLBACKS` on a callback, as a tuple, or () if the table has none.

    It is the note of the callback's nearest class in the table. Raises UsageError if the callback is refused.
    """
    settings = {setting.name: setting for setting in lightning_settings.CALLBACKS}
    kinds = [kind.__name__ for kind in type(callback).__mro__]
    setting = settings[next((kind for kind in kinds if kind in settings), "Callback")]
    is_used = setting.when or (lambda callback: True)
    return notes_of([replace(setting, name=kinds[0], when=is_used)], callback, "Trainer")


def notes_of_module(module: Any) -> tuple[str, ...]:
    """Return notes on a module: overridden hooks that are not planned, and compilation."""
    changed = [name for name in lightning_settings.MODULE_HOOKS if is_overridden(name, module)]
    notes = [f"hooks of the module that are not planned: {', '.join(changed)}"] if changed else []
    return (*notes, *([COMPILED] if module._compiler_ctx is not None else []))
