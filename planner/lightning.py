"""A Lightning callback that sets the batch size before training, without a trial run.

Needs `pip install 'gpu-batch-planner[lightning]'`. In a script:

    trainer = Trainer(callbacks=[BatchSizePlanner()])
    trainer.fit(model, datamodule=data)  # data.batch_size is what fits
"""

from typing import Any, Unpack

from planner.trace.torchvision_shim import prepare_torchvision

prepare_torchvision()  # lightning imports torchmetrics, which imports torchvision

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # noqa: E402
from lightning.pytorch.utilities.parsing import lightning_hasattr, lightning_setattr  # noqa: E402
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # noqa: E402

from planner.api import MaxBatchResult  # noqa: E402
from planner.errors import PlannerError, UsageError  # noqa: E402
from planner.job import ClipGradients, Precision  # noqa: E402
from planner.keywords import Options  # noqa: E402
from planner.live_api import on_some_card, plan_live_model, rounded_down  # noqa: E402
from planner.trace.optimizer_fields import fields_of_optimizer  # noqa: E402

_PRECISIONS = {
    "32-true": Precision.FP32,
    "16-mixed": Precision.AMP_FP16,
    "bf16-mixed": Precision.AMP_BF16,
    "16-true": Precision.FP16,
    "bf16-true": Precision.BF16,
}


class BatchSizePlanner(Callback):  # type: ignore[misc]  # lightning's types are not followed
    """Plans the largest batch from the module's `training_step` and the first batch of its data.

    The precision, accumulation, clipping and number of devices are those of the trainer, the optimizer that
    of `configure_optimizers`. Afterwards `batch_size` is what was set and `result` the plan behind it.
    """

    def __init__(
        self,
        batch_arg_name: str = "batch_size",
        *,
        multiple_of: int = 1,
        sample: Any = None,
        **options: Unpack[Options],
    ) -> None:
        """`batch_arg_name` is the attribute of the module or the data module that holds the batch size.

        The batch size is rounded down to `multiple_of`. `sample` is a batch to learn shapes from, by default
        the first of the training data. `options` are those of `planner.max_batch`, such as `confidence`;
        without `gpu` or `gpu_mib` it is planned for the local card.
        """
        self.result: MaxBatchResult | None = None
        self.batch_size: int | None = None
        self._name, self._multiple, self._sample = batch_arg_name, multiple_of, sample
        self._options = on_some_card(options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan and set the batch size; the data is loaded afterwards."""
        if not lightning_hasattr(pl_module, self._name):
            raise MisconfigurationException(
                f"BatchSizePlanner: neither the module nor the data module has {self._name!r}; "
                "add it, and let the data loader use it"
            )
        if not trainer.fit_loop._data_source.is_module():
            raise MisconfigurationException(
                "BatchSizePlanner: the batch size of a loader that is passed to fit() cannot be changed; "
                "give the module or a data module a train_dataloader()"
            )
        try:
            self.result = self._plan(trainer, pl_module)
            self.batch_size = rounded_down(self.result.max_batch, self._multiple)
        except PlannerError as error:
            raise MisconfigurationException(f"BatchSizePlanner: {error}") from error
        lightning_setattr(pl_module, self._name, self.batch_size)
        rank_zero_info(f"BatchSizePlanner: {self._name} = {self.batch_size}")

    def _plan(self, trainer: Trainer, module: LightningModule) -> MaxBatchResult:
        if not module.automatic_optimization:
            raise UsageError("manual optimization does as it likes; plan its model with planner.max_batch")
        sample = self._sample
        if sample is None:
            sample = next(iter(trainer.fit_loop._data_source.dataloader()))
        left_behind = (trainer, module._trainer, module._fabric)
        present = [thing for thing in left_behind if thing is not None]
        fields = {**fields_of_trainer(trainer), **fields_of_optimizers(module.configure_optimizers())}
        return plan_live_model(module, sample, _training_step, fields, self._options, present)


def _training_step(module: Any, batch: Any) -> Any:
    assert isinstance(module, LightningModule)
    return module.training_step(batch, 0)


def fields_of_trainer(trainer: Trainer) -> dict[str, Any]:
    """What a trainer decides of a job. Raises UsageError for a precision that is not planned."""
    name = str(trainer.precision)
    if name not in _PRECISIONS:
        raise UsageError(f"precision {name} is not planned; use one of {', '.join(_PRECISIONS)}")
    clip = ClipGradients.NONE
    if trainer.gradient_clip_val:
        by_value = str(trainer.gradient_clip_algorithm or "norm") == "value"
        clip = ClipGradients.VALUE if by_value else ClipGradients.NORM
    return {
        "precision": _PRECISIONS[name],
        "grad_scaler": name == "16-mixed",
        "accumulate": trainer.accumulate_grad_batches,
        "clip_gradients": clip,
        "ddp": trainer.world_size > 1,
    }


def fields_of_optimizers(configured: Any) -> dict[str, Any]:
    """What the result of `configure_optimizers` decides. Raises UsageError for several or unknown ones."""
    if isinstance(configured, dict):
        configured = configured["optimizer"]
    if isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], list):
        configured = configured[0]
    if isinstance(configured, (list, tuple)):
        if len(configured) != 1:
            raise UsageError(f"{len(configured)} optimizers are configured; plans are made for one")
        (configured,) = configured
        if isinstance(configured, dict):
            configured = configured["optimizer"]
    return fields_of_optimizer(configured)
