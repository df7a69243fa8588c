"""The batch size for Hugging Face's `Trainer` and for accelerate, planned before training.

    arguments = plan_training_arguments(model, arguments, sample, gpu="A100 80GB")
    trainer = Trainer(model, arguments, ...)

    batch = plan_batch_size(model, sample, optimizer, accelerator, gpu="auto")

`sample` is a batch as the data collator gives it: a mapping of tensors with labels. Nothing is run on a GPU.
Needs `pip install 'gpu-batch-planner[hf]'` or `'gpu-batch-planner[accelerate]'`.
"""

import copy
from collections.abc import Mapping
from typing import Any, Unpack

from planner.api import MaxBatchResult
from planner.errors import UsageError
from planner.job import Checkpoint, ClipGradients, Optimizer, OptimizerImpl, Precision
from planner.keywords import Options
from planner.live_api import on_some_card, plan_live_model, rounded_down
from planner.trace.torchvision_shim import prepare_torchvision

prepare_torchvision()  # transformers imports torchvision where it is installed

# transformers.training_args.OptimizerNames, as far as they are planned.
_OPTIMIZERS = {
    "adamw_torch": (Optimizer.ADAMW, OptimizerImpl.FOREACH),
    "adamw_torch_fused": (Optimizer.ADAMW, OptimizerImpl.FUSED),
    "sgd": (Optimizer.SGD, OptimizerImpl.FOREACH),
    "adagrad": (Optimizer.ADAGRAD, OptimizerImpl.FOREACH),
    "rmsprop": (Optimizer.RMSPROP, OptimizerImpl.FOREACH),
}
_ACCELERATE_PRECISIONS = {
    "no": Precision.FP32,
    "fp16": Precision.AMP_FP16,
    "bf16": Precision.AMP_BF16,
}


def plan_training_arguments(
    model: Any, arguments: Any, sample: Mapping[str, Any], *, multiple_of: int = 1, **options: Unpack[Options]
) -> Any:
    """A copy of the `TrainingArguments` with the largest batch per device that fits.

    `gradient_accumulation_steps` is lowered, to 1 at the least, so that the samples in each step of the
    optimizer stay as many as before or become as few more as possible. Raises the errors of
    `planner.errors`, UsageError for arguments that are not planned.
    """
    fields = fields_of_arguments(arguments)
    batch = rounded_down(_plan(model, sample, fields, options).max_batch, multiple_of)
    wanted = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    steps = max(1, -(-wanted // batch))
    changed = copy.copy(arguments)
    changed.per_device_train_batch_size = min(batch, -(-wanted // steps)) if steps > 1 else batch
    changed.gradient_accumulation_steps = steps
    return changed


def plan_batch_size(
    model: Any, sample: Mapping[str, Any], optimizer: Any, accelerator: Any, /, **options: Unpack[Options]
) -> int:
    """The largest batch per process for a loop with accelerate.

    Precision, accumulation and the number of processes are those of the accelerator. The model is as it was
    before `accelerator.prepare`, which wraps it. Raises the errors of `planner.errors`, UsageError where
    nothing fits.
    """
    from planner.trace.optimizer_fields import fields_of_optimizer

    # accelerate/accelerator.py, prepare_model: mixed precision gives the model another forward, several
    # processes put it into DistributedDataParallel.
    if "_original_forward" in vars(model) or type(model).__name__ == "DistributedDataParallel":
        raise UsageError("the model is prepared already; plan before accelerator.prepare(model)")
    name = str(accelerator.mixed_precision)
    if name not in _ACCELERATE_PRECISIONS:
        raise UsageError(
            f"mixed precision {name} is not planned; use one of {', '.join(_ACCELERATE_PRECISIONS)}"
        )
    fields = {
        "precision": _ACCELERATE_PRECISIONS[name],
        "grad_scaler": name == "fp16",
        "accumulate": accelerator.gradient_accumulation_steps,
        "ddp": accelerator.num_processes > 1,
        **fields_of_optimizer(_unwrapped(optimizer)),
    }
    return rounded_down(_plan(model, sample, fields, options).max_batch, 1)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer in an `AcceleratedOptimizer`, or itself."""
    return optimizer.optimizer if type(optimizer).__name__ == "AcceleratedOptimizer" else optimizer


def fields_of_arguments(arguments: Any) -> dict[str, Any]:
    """What `TrainingArguments` decide of a job. Raises UsageError for what is not planned."""
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if name not in _OPTIMIZERS:
        raise UsageError(f"optim {name} is not planned; use one of {', '.join(_OPTIMIZERS)}")
    kind, implementation = _OPTIMIZERS[name]
    precision = Precision.FP32
    if arguments.fp16 or arguments.bf16:
        precision = Precision.AMP_FP16 if arguments.fp16 else Precision.AMP_BF16
    clips = bool(arguments.max_grad_norm)
    # transformers 5 calls it activation_checkpointing.
    checkpoints = getattr(arguments, "activation_checkpointing", False) or arguments.gradient_checkpointing
    return {
        "optimizer": kind,
        "optimizer_impl": implementation,
        "precision": precision,
        "grad_scaler": bool(arguments.fp16),
        "accumulate": arguments.gradient_accumulation_steps,
        "clip_gradients": ClipGradients.NORM if clips else ClipGradients.NONE,
        "checkpoint": Checkpoint.BLOCKS if checkpoints else Checkpoint.NONE,
        "ddp": arguments.world_size > 1,
    }


def _plan(
    model: Any, sample: Mapping[str, Any], fields: Mapping[str, Any], options: Options
) -> MaxBatchResult:
    return plan_live_model(model, dict(sample), _step, fields, on_some_card(options))


def _step(module: Any, batch: Mapping[str, Any]) -> Any:
    return module(**batch)
