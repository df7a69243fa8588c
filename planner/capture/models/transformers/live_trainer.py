"""Copy an existing Trainer of transformers or TRL.

The copy is trained in a capture. The copy has models without weights, a new accelerator that finds the
planned GPU, and no callbacks that report or save. It shares data and tokenizers with the original and copies
its settings; the original is not changed. Facts from transformers 5.23 and TRL 1.16.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from planner.capture.models.live.closures import rebind_closures
from planner.capture.models.live.job import complete_copy, weightless_memo
from planner.capture.models.live.optimizer import read_optimizer
from planner.capture.models.transformers.own_trainer import is_trainer, trainers_constructed
from planner.capture.models.transformers.trainer_batches import longest_sample, tensors_of
from planner.capture.models.user_code.step import modules_held_by
from planner.capture.process_state import preserve_process_state
from planner.errors import ModelError, UsageError
from planner.jobs import Job, Mode, kind_text

_SHARED = ("train_dataset", "eval_dataset", "processing_class", "_memory_tracker", "model_init")
_REBUILT = ("args", "accelerator", "gather_function", "callback_handler", "optimizer", "lr_scheduler")
_OF_DEVICE = ("_setup_devices", "distributed_state")  # attributes in which arguments cache the device
_RUN = ("DefaultFlowCallback", "SyncRefModelCallback")  # callbacks that decide the steps, or compute
_PREPARED = "_original_forward"  # attribute of a module whose forward accelerate's prepare_model replaced


def check_trainer(trainer: object) -> None:
    """Raise UsageError if an object is not a Trainer of transformers or TRL."""
    if not is_trainer(trainer):
        raise UsageError(
            f"expected a Trainer of transformers or TRL, got {kind_text(trainer)}; for a loop of your "
            "own with accelerate use plan_batch_size"
        )


def trainer_job(trainer: Any) -> Job:
    """Return the job that runs a trainer's own `train()`.

    Raises UsageError for a trainer that is prepared already, runs in several processes, or splits its model
    over GPUs.
    """
    check_trainer(trainer)
    name = type(trainer).__name__
    if _PREPARED in vars(trainer.model) or trainer.model_wrapped is not trainer.model:
        raise UsageError(f"{name}: its model is prepared for training already; plan before train()")
    if trainer.args.world_size > 1:
        raise UsageError(f"{name}: is one of several processes; plan in one process, before torchrun")
    if trainer.is_model_parallel:
        raise UsageError(f"{name}: its model is split over GPUs (device_map); remove device_map")
    return Job.create(name, mode=Mode.STEP)


def notes_of_callbacks(trainer: Any) -> tuple[str, ...]:
    """Return notes on the trainer's callbacks that a plan does not run.

    Callbacks of transformers itself are not noted.
    """
    names = [
        type(one).__name__
        for one in trainer.callback_handler.callbacks
        if type(one).__name__ not in _RUN and not type(one).__module__.startswith("transformers.")
    ]
    return tuple(
        f"the trainer's {name} is not run; what it keeps on the GPU is not counted" for name in names
    )


def trainer_maker(trainer: Any, micro_batches: int, evaluates: bool = True) -> Callable[[], Any]:
    """Return a function that copies a trainer, to be called in a capture.

    The copy runs `micro_batches` micro-batches per step. With `evaluates=False` the copy does not evaluate.
    """

    def make() -> Any:
        with trainers_constructed():
            copied = _copied(trainer)
            copied.args.gradient_accumulation_steps = micro_batches
            if not evaluates:
                copied.args.eval_strategy, copied.args.eval_on_start = "no", False
            return copied

    return make


def set_batch(trainer: Any, batch: int, micro_batches: int) -> None:
    """Set a trainer's batch size per device and its micro-batches per step."""
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = batch
    trainer.args.gradient_accumulation_steps = micro_batches


def bytes_of_longest_sample(trainer: Any) -> int:
    """Return the bytes that a second copy of the longest sample adds to a batch."""
    with preserve_process_state():  # samples and collators may draw random numbers
        one, two = longest_sample(trainer, trainer.train_dataset, "train_dataset", type(trainer).__name__)
    return _bytes_of(two) - _bytes_of(one)


def _bytes_of(batch: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch))


def _copied(trainer: Any) -> Any:
    copied = object.__new__(type(trainer))
    memo: dict[int, Any] = {id(value): value for value in _values(trainer, _SHARED)}
    memo[id(trainer)] = copied
    modules = modules_held_by(trainer)
    weightless_memo(modules, memo)
    copied.args = memo[id(trainer.args)] = _arguments(trainer.args)
    copied.model, copied.deepspeed = trainer.model, None  # the next line reads both
    copied.create_accelerator_and_postprocess()
    memo[id(trainer.accelerator)] = copied.accelerator
    memo.update({id(one): None for one in (trainer.optimizer, trainer.lr_scheduler) if one is not None})
    for name, value in vars(trainer).items():
        if name not in _REBUILT:
            setattr(copied, name, _copy_of(value, memo, trainer, name))
    modules = [module for module in modules if id(module) in memo]
    for module in modules:
        complete_copy(module, memo[id(module)], memo)
    rebind_closures(copied, memo)
    copied.model_init = None  # it has made the model already
    copied.optimizer = copied.lr_scheduler = None
    if trainer.optimizer is not None:
        copied.optimizer = read_optimizer(trainer.optimizer, trainer.model).over(copied.model)
    callbacks = [one for one in trainer.callback_handler.callbacks if type(one).__name__ in _RUN]
    copied.callback_handler = type(trainer.callback_handler)(
        [_copy_of(one, memo, trainer, "callback_handler") for one in callbacks],
        copied.model, copied.processing_class, copied.optimizer, None,
    )  # fmt: skip
    _place(copied, [memo[id(module)] for module in modules])
    return copied


def _values(owner: object, names: tuple[str, ...]) -> Iterator[Any]:
    yield from (vars(owner)[name] for name in names if vars(owner).get(name) is not None)


def _copy_of(value: Any, memo: dict[int, Any], trainer: Any, name: str) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise ModelError(
            f"{type(trainer).__name__}: its attribute {name} cannot be copied ({type(error).__name__}: "
            f"{error}); name a function of a file that makes the trainer: planner max-batch --model "
            "FILE.py:FUNCTION"
        ) from error


def _arguments(arguments: Any) -> Any:
    """Return a copy of the training arguments for the planned GPU. The copy reports nothing."""
    bare = copy.copy(arguments)
    for name in _OF_DEVICE:
        vars(bare).pop(name, None)
    copied = copy.deepcopy(bare)
    copied.use_cpu = copied.auto_find_batch_size = False
    copied.report_to = []
    assert copied.device.type != "cpu"  # reading `device` finds the GPU, before an accelerator is made
    return copied


def _place(trainer: Any, modules: list[nn.Module]) -> None:
    """Move a copied trainer's models to the GPU.

    Models that accelerate had prepared are prepared again. The trainers' constructors do the same. Source:
    transformers/trainer.py, and TRL's trainers for reference models.
    """
    device = trainer.args.device
    if trainer.place_model_on_device and getattr(trainer.model, "quantization_method", None) is None:
        trainer.model.to(device)
    for module in modules:
        if _PREPARED in vars(module):
            module.forward = vars(module).pop(_PREPARED)
            trainer.accelerator.prepare_model(module, evaluation_mode=True)
