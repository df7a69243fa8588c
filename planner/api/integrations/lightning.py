"""A Lightning callback that plans and sets the batch size before training.

No trial run is needed. Needs `pip install 'gpu-batch-planner[lightning]'`. In a script:

    trainer = Trainer(callbacks=[BatchSizePlanner()])
    trainer.fit(model, datamodule=data)  # sets data.batch_size
"""

from contextlib import suppress
from typing import Any, Unpack

from planner.api.integrations.batch_choice import check_multiple
from planner.api.integrations.lightning_loop import loop_of_trainer, without_validation_data
from planner.api.integrations.lightning_package import Callback, parsing, rank_zero
from planner.api.integrations.live_model import choose_batch
from planner.api.max_batch import MaxBatchResult
from planner.api.request.options import Options
from planner.errors import ModelError, UsageError, reason_of


class BatchSizePlanner(Callback):  # type: ignore[misc]  # lightning's types are not followed
    """A Lightning callback that plans and sets the largest batch.

    The plan is of the module's `training_step` on the first batch of its data. Precision, accumulation,
    clipping, weight averages, processes and optimizer are the trainer's. Afterwards `batch_size` is the batch
    size that was set and `result` its plan, whose assumptions name settings that are not planned. The batch
    runs without retries if any batch can. If no plan can be made, a warning gives the reason, training
    continues with its batch size, and `result` and `batch_size` are None.
    """

    def __init__(
        self,
        batch_arg_name: str = "batch_size",
        *,
        multiple_of: int = 1,
        sample: Any = None,
        **options: Unpack[Options],
    ) -> None:
        """Create a callback that sets the attribute `batch_arg_name` to the planned batch size.

        `batch_arg_name` is the attribute to set on the module or the data module. The batch size is rounded
        down to a multiple of `multiple_of`. `sample` is a batch that shows the shapes, by default the first
        batch of the training data. `options` are options of `planner.max_batch`, such as `confidence`; the
        local GPU is the default. Raises UsageError for an invalid `multiple_of`.
        """
        check_multiple(multiple_of)
        self.result: MaxBatchResult | None = None
        self.batch_size: int | None = None
        self._name, self._multiple, self._sample, self._options = batch_arg_name, multiple_of, sample, options

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Plan and set the batch size, before the data is loaded."""
        batch = trainer.strategy.broadcast(self._planned(trainer, pl_module))  # the same for all processes
        self.batch_size = None if batch is None else self._set(trainer, pl_module, batch)
        if self.batch_size is None:
            self.result = None

    def _planned(self, trainer: Any, module: Any) -> int | None:
        """Return the planned batch size, or None with a warning if planning fails."""
        try:
            return self._plan(trainer, module)
        except Exception as error:  # a plan is a help: whatever goes wrong with it, training goes on
            self._warn_of(error)
            return None

    def _set(self, trainer: Any, module: Any, batch: int) -> int | None:
        """Set and return the batch size, or warn and return None if the module or its data refuses it."""
        before = parsing.lightning_getattr(module, self._name)
        try:
            parsing.lightning_setattr(module, self._name, batch)
            _reload_data(trainer)
        except Exception as error:  # from the user's properties, schedules and data
            with suppress(Exception):
                parsing.lightning_setattr(module, self._name, before)
            self._warn_of(error)
            return None
        rank_zero.rank_zero_info(f"BatchSizePlanner: {self._name} = {batch}")
        return batch

    def _warn_of(self, error: Exception) -> None:
        rank_zero.rank_zero_warn(
            f"BatchSizePlanner: no plan, {self._name} stays as it is: {reason_of(error)}"
        )

    def _plan(self, trainer: Any, module: Any) -> int:
        if not parsing.lightning_hasattr(module, self._name):
            raise UsageError(
                f"neither the module nor the data module has {self._name!r}; add it, and let the data loader "
                "use it"
            )
        if not trainer.fit_loop._data_source.is_module():
            raise UsageError(
                "the batch size of a loader that is passed to fit() cannot be changed; give the module or a "
                "data module a train_dataloader()"
            )
        loop = loop_of_trainer(trainer, module, self._sample, self._name)
        try:
            choice = choose_batch(loop, self._options, self._multiple)
        except ModelError as error:
            if loop.evaluation is None:
                raise
            loop = without_validation_data(loop, str(error))
            choice = choose_batch(loop, self._options, self._multiple)
        self.result = choice.result
        for line in filter(None, (*loop.unplanned, choice.warning)):
            rank_zero.rank_zero_warn(f"BatchSizePlanner: {line}")
        return choice.batch


def _reload_data(trainer: Any) -> None:
    """If data loaders exist, discard them, and set up optimizers and schedules again."""
    loop = trainer.fit_loop
    if loop._combined_loader is None:
        return
    loop._combined_loader = None
    loop.epoch_loop.val_loop._combined_loader = None
    trainer.strategy.setup_optimizers(trainer)
