"""Plan the batch size of Hugging Face's `Trainer`, or of a loop with accelerate.

The plan is made before training.

    arguments = plan_training_arguments(model, arguments, sample, gpu="A100 80GB")
    trainer = Trainer(model, arguments, ...)

    plan_trainer(trainer, gpu="RTX 4090")  # of transformers or TRL, before trainer.train()

    batch = plan_batch_size(model, sample, optimizer, accelerator, gpu="auto")

`sample` is a batch from the data collator: a mapping of tensors with labels. Nothing is run on a GPU.
Settings of the trainer or accelerator that change memory and are not planned are refused or named: in the
results of the functions `max_batch_of_...`, and as warnings by the other functions. Needs `pip install
'gpu-batch-planner[hf]'` or `'gpu-batch-planner[accelerate]'`.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Unpack

from msgspec.structs import replace

from planner.api.integrations import accelerate_settings, transformers_settings
from planner.api.integrations.batch_choice import BatchSplit, check_multiple
from planner.api.integrations.deepspeed_fields import NOTES as DEEPSPEED_NOTES, deepspeed_fields
from planner.api.integrations.fsdp_fields import fsdp_fields, notes_of_plugin, plugin_of_arguments
from planner.api.integrations.live_model import (
    BatchChoice,
    LiveLoop,
    choice_of,
    choice_with_evaluation,
    choose_batch,
    plan_job,
    plan_live_model,
)
from planner.api.integrations.micro_batches import shortfall, split_to_fit
from planner.api.integrations.settings import look_up, model_errors, notes_of, text_of
from planner.api.max_batch import MaxBatchResult
from planner.api.request.options import Options
from planner.capture import (
    bytes_of_longest_sample,
    check_trainer,
    notes_of_callbacks,
    optimizer_name_of,
    prepare_torchvision,
    set_batch,
    trainer_job,
    trainer_maker,
)
from planner.errors import UsageError, reason_of
from planner.jobs import ClipGradients, Optimizer, OptimizerImpl, Precision, ZeroGrad, kind_text

prepare_torchvision()  # transformers imports torchvision if it is installed

# The names in transformers.training_args.OptimizerNames for torch's optimizers; other optimizers are known by
# their classes.
_OPTIMIZERS: dict[str, tuple[Optimizer | str, OptimizerImpl]] = {
    "adamw_torch": (Optimizer.ADAMW, OptimizerImpl.FOREACH),
    "adamw_torch_fused": (Optimizer.ADAMW, OptimizerImpl.FUSED),
    "sgd": (Optimizer.SGD, OptimizerImpl.FOREACH),
    "adagrad": (Optimizer.ADAGRAD, OptimizerImpl.FOREACH),
    "rmsprop": (Optimizer.RMSPROP, OptimizerImpl.FOREACH),
}
_ACCELERATE_PRECISIONS = {"no": Precision.FP32, "fp16": Precision.AMP_FP16, "bf16": Precision.AMP_BF16}


def plan_training_arguments(
    model: Any,
    arguments: Any,
    sample: Mapping[str, Any],
    *,
    multiple_of: int = 1,
    grow: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Return a copy of `TrainingArguments` with batch size and accumulation set so that batches fit.

    The effective batch is kept if possible. If no plan can be made, training still continues: a warning gives
    the reason, and the copy keeps its batch size.

    The samples of one optimizer step on one device, `per_device_train_batch_size *
    gradient_accumulation_steps`, are kept if all of them fit in one micro-batch, or if a divisor of their
    number makes good use of the memory. Otherwise they are reduced as little as possible, with a warning, and
    never increased. Among splits with up to twice as many micro-batches as needed, the split with the most
    samples is chosen, and among equals the split with the fewest micro-batches. With `grow` the batch is the
    largest that fits, and accumulation goes down to 1 at the least. The batch runs without retries if any
    batch can. Raises UsageError for an invalid `multiple_of`.
    """
    check_multiple(multiple_of)
    try:
        chosen = _split_of_arguments(model, arguments, sample, multiple_of, grow, options)
    except Exception as error:  # a plan is a help: whatever goes wrong with it, training goes on
        _warn(_no_plan(error))
        return copy.copy(arguments)
    changed = copy.copy(arguments)
    changed.per_device_train_batch_size = chosen.batch
    changed.gradient_accumulation_steps = chosen.steps
    return changed


def _split_of_arguments(
    model: Any, arguments: Any, sample: Mapping[str, Any], multiple_of: int, grow: bool, options: Options
) -> BatchSplit:
    samples = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    loop = _loop_of_arguments(model, arguments, sample)
    choice, chosen = split_to_fit(
        samples,
        lambda steps: choose_batch(_accumulating_few(loop, steps), options, multiple_of),
        _bytes_a_sample(loop.sample),
        multiple_of,
        grow,
    )
    _warn(*loop.unplanned, choice.warning, shortfall(samples, chosen))
    return chosen


def max_batch_of_arguments(
    model: Any, arguments: Any, sample: Mapping[str, Any], **options: Unpack[Options]
) -> MaxBatchResult:
    """Return the plan of the largest batch per device for `TrainingArguments`.

    The result has a report. The report's assumptions name the settings that are not planned. Raises the
    errors of `planner.errors`.
    """
    loop = _loop_of_arguments(model, arguments, sample)
    return plan_live_model(_accumulating(loop, arguments.gradient_accumulation_steps), options)


def plan_trainer(
    trainer: Any, *, multiple_of: int = 1, grow: bool = False, **options: Unpack[Options]
) -> MaxBatchResult | None:
    """Set the batch size and accumulation of a Trainer so that batches fit, and return the plan or None.

    The Trainer is of transformers or TRL. The trainer is used as constructed: `SFTTrainer`, `DPOTrainer`,
    `RewardTrainer`, `Trainer`, or a class of yours that extends one of them. A copy of it without weights
    runs its `train()`, so that its loss, reference model and adapters are planned.
    `per_device_train_batch_size` and `gradient_accumulation_steps` of `trainer.args` are chosen as by
    `plan_training_arguments`. Returns the plan for the batch.

    If no plan can be made, training still continues: a warning gives the reason, the trainer is unchanged,
    and None is returned. Raises UsageError for an invalid `multiple_of` and for an object that is no Trainer.
    """
    check_multiple(multiple_of)
    check_trainer(trainer)
    try:
        return _plan_and_set(trainer, multiple_of, grow, options)
    except Exception as error:  # a plan is a help: whatever goes wrong with it, training goes on
        _warn(_no_plan(error))
        return None


def _plan_and_set(trainer: Any, multiple_of: int, grow: bool, options: Options) -> MaxBatchResult:
    plan = _plan_of_trainer(trainer, options)
    samples = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    choice, chosen = split_to_fit(
        samples,
        lambda steps: _choice_of_trainer(trainer, plan, steps, multiple_of),
        bytes_of_longest_sample(trainer),
        multiple_of,
        grow,
    )
    _warn(*notes_of_trainer(trainer), choice.warning, shortfall(samples, chosen))
    set_batch(trainer, chosen.batch, chosen.steps)
    return choice.result


def max_batch_of_trainer(trainer: Any, **options: Unpack[Options]) -> MaxBatchResult:
    """Return the plan of the largest batch per device for a Trainer.

    The Trainer is of transformers or TRL, and the result has a report. The trainers are as for
    `plan_trainer`, but are not changed.
    """
    return _plan_of_trainer(trainer, options)(trainer.args.gradient_accumulation_steps)


def plan_batch_size(
    model: Any, sample: Mapping[str, Any], optimizer: Any, accelerator: Any, /, **options: Unpack[Options]
) -> int:
    """Return the largest batch per process for a loop with accelerate.

    The batch takes no retries if possible. Precision, accumulation and the number of processes are the
    accelerator's. The model must not have been wrapped by `accelerator.prepare` yet. If every batch that fits
    takes retries, a warning is given. Raises the errors of `planner.errors`, among them UsageError if no
    batch fits.
    """
    loop = _loop_of_accelerator(model, sample, optimizer, accelerator)
    choice = choose_batch(loop, options, 1)
    _warn(*loop.unplanned, choice.warning)
    return choice.batch


def max_batch_of_loop(
    model: Any, sample: Mapping[str, Any], optimizer: Any, accelerator: Any, /, **options: Unpack[Options]
) -> MaxBatchResult:
    """Return the plan of the largest batch per process for a loop with accelerate.

    The parameters are as for `plan_batch_size`; the report's assumptions name settings that are not planned.
    """
    return plan_live_model(_loop_of_accelerator(model, sample, optimizer, accelerator), options)


def fields_of_arguments(arguments: Any) -> dict[str, Any]:
    """Convert `TrainingArguments` to a job's fields. Raises UsageError for settings that are not planned."""
    kind, implementation = _OPTIMIZERS.get(text_of(arguments.optim)) or (
        optimizer_name_of(arguments),
        OptimizerImpl.FOREACH,
    )
    precision = Precision.FP32
    if arguments.fp16 or arguments.bf16:
        precision = Precision.AMP_FP16 if arguments.fp16 else Precision.AMP_BF16
    evaluates = transformers_settings.evaluates(arguments)
    fields = {
        "optimizer": kind,
        "optimizer_impl": implementation,
        "precision": precision,
        "grad_scaler": bool(arguments.fp16),
        "zero_grad": ZeroGrad.AFTER_STEP,  # transformers/trainer.py
        "accumulate": arguments.gradient_accumulation_steps,
        "clip_gradients": ClipGradients.NORM if arguments.max_grad_norm else ClipGradients.NONE,
        "evaluate": evaluates,
        "eval_batch": arguments.per_device_eval_batch_size if evaluates else 0,
        "ddp": arguments.world_size > 1,
        "liger": bool(getattr(arguments, "use_liger_kernel", False)),
    }
    if arguments.deepspeed:
        given, ranks = arguments.deepspeed, arguments.world_size
        return deepspeed_fields(given, fields, ranks, "TrainingArguments: deepspeed")
    if arguments.fsdp:
        kwargs = getattr(arguments.accelerator_config, "gradient_accumulation_kwargs", None) or {}
        syncs = bool(kwargs.get("sync_each_batch"))
        plugin = plugin_of_arguments(arguments)
        return fsdp_fields(plugin, fields, arguments.world_size, "TrainingArguments: fsdp", syncs)
    return fields


def fields_of_accelerator(accelerator: Any) -> dict[str, Any]:
    """Convert an `Accelerator` to a job's fields. Raises UsageError for settings that are not planned."""
    name = str(accelerator.mixed_precision)
    precision = look_up(_ACCELERATE_PRECISIONS, name, "mixed precision")
    scaler, ddp = accelerator.scaler_handler, accelerator.ddp_handler
    fields = {
        "precision": precision,
        "grad_scaler": name == "fp16" and (scaler is None or scaler.enabled),
        "accumulate": accelerator.gradient_accumulation_steps,
        "ddp": accelerator.num_processes > 1,
        "ddp_bucket_view": accelerator.num_processes > 1 and ddp is not None and ddp.gradient_as_bucket_view,
    }
    kind, ranks = text_of(accelerator.distributed_type), accelerator.num_processes
    if kind == "DEEPSPEED":
        config = accelerator.deepspeed_plugin.deepspeed_config
        return deepspeed_fields(config, fields, ranks, "Accelerator: deepspeed_plugin")
    if kind == "FSDP":
        syncs = bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"))
        replicas = getattr(accelerator.parallelism_config, "dp_replicate_size", 1)
        plugin = accelerator.state.fsdp_plugin
        return fsdp_fields(plugin, fields, ranks, "Accelerator: fsdp_plugin", syncs, replicas)
    return fields


def notes_of_arguments(arguments: Any) -> tuple[str, ...]:
    """Return a note for each argument that is in use and not planned.

    Raises UsageError for refused arguments.
    """
    tables = (*transformers_settings.SETTINGS, *transformers_settings.VALUES)
    notes = notes_of(tables, arguments, "TrainingArguments")
    if arguments.fsdp:
        notes += notes_of_plugin(plugin_of_arguments(arguments), "TrainingArguments: fsdp_config")
    return notes


def notes_of_accelerator(accelerator: Any) -> tuple[str, ...]:
    """Return a note for each setting of an accelerator that is in use and not planned.

    Raises UsageError for refused settings.
    """
    notes = notes_of(accelerate_settings.SETTINGS, accelerator, "Accelerator")
    if text_of(accelerator.distributed_type) == "FSDP":
        notes += notes_of_plugin(accelerator.state.fsdp_plugin, "FullyShardedDataParallelPlugin")
    for name, (attribute, table) in accelerate_settings.HANDLERS.items():
        handler = getattr(accelerator, attribute, None)
        if handler is not None:
            notes += notes_of(table, handler, name)
    return notes


def notes_of_trainer(trainer: Any) -> tuple[str, ...]:
    """Return a note for each setting of a trainer that is in use and not planned.

    Raises UsageError for refused settings.
    """
    tables = (*transformers_settings.SETTINGS, *transformers_settings.VALUES)
    own = [one for one in tables if one.name not in transformers_settings.BY_ITS_TRAINER]
    return (*notes_of(own, trainer.args, "TrainingArguments"), *notes_of_callbacks(trainer))


def _plan_of_trainer(trainer: Any, options: Options) -> Callable[..., MaxBatchResult]:
    """Return a function that plans the largest batch of a trainer for a number of micro-batches.

    The function takes the number of micro-batches per optimizer step. With `evaluates=False` it plans the
    trainer without evaluation.
    """
    job, unplanned = trainer_job(trainer), notes_of_trainer(trainer)

    def plan(steps: int, evaluates: bool = True) -> MaxBatchResult:
        with model_errors(f"{job.model.name}: cannot be planned"):
            return plan_job(job, trainer_maker(trainer, steps, evaluates), unplanned, options)

    return plan


def _choice_of_trainer(
    trainer: Any, plan: Callable[..., MaxBatchResult], steps: int, multiple: int
) -> BatchChoice:
    """Choose the batch size of a trainer for `steps` micro-batches per optimizer step.

    If the trainer evaluates, retries are accepted in the evaluation. `plan` is the function from
    `_plan_of_trainer`. Raises UsageError if no batch fits.
    """
    result = plan(steps)
    if not transformers_settings.evaluates(trainer.args):
        return choice_of(result, multiple)
    smaller = "take a smaller per_device_eval_batch_size, or eval_accumulation_steps=1"
    return choice_with_evaluation(result, lambda: plan(steps, evaluates=False), multiple, smaller)


@model_errors("the job cannot be read")
def _loop_of_arguments(model: Any, arguments: Any, sample: Mapping[str, Any]) -> LiveLoop:
    from planner.capture import (
        has_liger_kernels,
        loss_step,
        notes_of_optimizer,
        optimizer_of,
        prepare_for_training,
    )

    fields, unplanned = fields_of_arguments(arguments), notes_of_arguments(arguments)
    if fields["liger"] and not has_liger_kernels(model):
        fields["liger"] = False
        unplanned += ("TrainingArguments: use_liger_kernel: Liger has no kernels for this model",)
    live = optimizer_of(arguments, model)
    step, notes = loss_step(arguments), notes_of_optimizer(live)
    notes = (*notes, *(DEEPSPEED_NOTES if arguments.deepspeed else ()))
    prepare = partial(prepare_for_training, arguments)
    return LiveLoop(model, dict(sample), step, fields, unplanned, notes, optimizer=live, prepare=prepare)


@model_errors("the job cannot be read")
def _loop_of_accelerator(model: Any, sample: Mapping[str, Any], optimizer: Any, accelerator: Any) -> LiveLoop:
    from planner.capture import fields_of_optimizer, in_float32, notes_of_optimizer, read_optimizer

    # accelerate/accelerator.py, prepare_model: mixed precision gives the model another forward, several
    # processes put it into DistributedDataParallel.
    if not isinstance(sample, Mapping):
        raise UsageError(f"sample: {kind_text(sample)}; give a dict of the arguments of the model's forward")
    if "_original_forward" in vars(model) or type(model).__name__ == "DistributedDataParallel":
        raise UsageError("the model is prepared already; plan before accelerator.prepare(model)")
    notes = notes_of_accelerator(accelerator)
    plain = optimizer.optimizer if type(optimizer).__name__ == "AcceleratedOptimizer" else optimizer
    fields = {**fields_of_accelerator(accelerator), **fields_of_optimizer(plain)}
    live = read_optimizer(plain, model)

    def step(module: Any, batch: Mapping[str, Any]) -> Any:
        outputs = module(**batch)
        # DeepSpeed's engine and FSDP2's policy cast by themselves.
        casts = fields["precision"] is Precision.FP32 or "deepspeed" in fields
        return outputs if casts else in_float32(outputs)

    further = (*notes_of_optimizer(live), *(DEEPSPEED_NOTES if "deepspeed" in fields else ()))
    return LiveLoop(model, dict(sample), step, fields, notes, further, optimizer=live)


def _bytes_a_sample(sample: Mapping[str, Any]) -> int:
    tensors = [value for value in sample.values() if hasattr(value, "element_size")]
    return sum(value[:1].numel() * value.element_size() for value in tensors)


def _accumulating(loop: LiveLoop, steps: int) -> LiveLoop:
    """Return the loop with `steps` micro-batches per optimizer step, whose inputs are all held on the GPU.

    The Trainer holds the inputs of a step on the GPU at once (transformers/trainer.py, `get_batch_samples`,
    from a data loader of accelerate that moves each batch to the device).
    """
    held = (steps - 1) * _bytes_a_sample(loop.sample)
    note = (
        f"the Trainer holds the inputs of all {steps} micro-batches of a step on the GPU, as one more input"
    )
    return replace(
        loop,
        fields={**loop.fields, "accumulate": steps},
        notes=(*loop.notes, f"{note} of {held:,} bytes a sample") if held else loop.notes,
        held_bytes=held,
    )


def _accumulating_few(loop: LiveLoop, steps: int) -> LiveLoop:
    """Return the loop with at most two micro-batches per step to trace, but the inputs of `steps` on the GPU.

    Further micro-batches request the same memory as the second.
    """
    held = _accumulating(loop, steps)
    return replace(held, fields={**held.fields, "accumulate": min(steps, 2)})


def _warn(*lines: str) -> None:
    """Issue each nonempty line as a warning at the user's code.

    The code is the caller of a public function.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    for line in filter(None, lines):
        warnings.warn(line, stacklevel=level)


def _no_plan(error: Exception) -> str:
    return f"no plan, per_device_train_batch_size stays as it is: {reason_of(error)}"
