"""Train a LightningModule by its own methods `training_step` and `configure_optimizers`.

The module is attached to a `Trainer` of its Lightning package, without loggers, callbacks and loops, so that
code which reads the trainer or steps optimizers by hand works unchanged. Facts from lightning 2.6.
"""

import importlib
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim

from planner.capture.models.libraries import quiet
from planner.capture.models.user_code.step import StepModule, unpacks_one
from planner.errors import ModelError
from planner.jobs import Job, Loss, Mode, kind_text

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_LOGGERS = ("lightning.pytorch.utilities.rank_zero", "pytorch_lightning.utilities.rank_zero")


def is_lightning_module(module: object) -> bool:
    """Return whether an object is a LightningModule of `lightning.pytorch` or `pytorch_lightning`."""
    return lightning_package_of(module) is not None


def train_by_lightning(module: object, job: Job) -> nn.Module:
    """Return a module whose forward pass runs the LightningModule's `training_step`.

    In mode `step` this is a whole step, whose optimization the LightningModule does by hand. Raises
    ModelError for other objects, and for manual optimization in other modes.
    """
    package = lightning_package_of(module)
    if package is None or not isinstance(module, nn.Module):
        kind = kind_text(module)
        raise ModelError(f"{job.model.name}: gives {kind}, not a LightningModule; name another --loss")
    core: Any = module
    with _silent():
        trainer = importlib.import_module(package).Trainer(accelerator="cpu", devices=1, barebones=True)
        trainer.strategy.connect(core)
        core.trainer = trainer
        core._device = torch.device("cuda", 0)
        core.setup("fit")
        core.configure_model()
    if job.loop.mode is Mode.STEP:
        trainer.strategy.setup_optimizers(trainer)
        return StepModule(_manual_step(core), core, job.model.name)
    if not core.automatic_optimization:
        raise ModelError(f"{job.model.name}: its optimization is manual; add --mode step")
    return _TrainingStep(core, package, job.model.name)


def uses_lightning(job: Job) -> bool:
    """Return whether the job trains a LightningModule by automatic optimization."""
    return job.loop.loss is Loss.TRAINING_STEP and job.loop.mode is Mode.TRAIN


class _TrainingStep(nn.Module):
    """A wrapper that runs a LightningModule's `training_step` as its forward pass.

    The step gets a batch as from a data loader.
    """

    def __init__(self, module: Any, package: str, name: str) -> None:
        super().__init__()
        self.module = module
        self._package, self._name = package, name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `training_step`. It is the loss, or a mapping that contains the loss."""
        return _run_training_step(self.module, kwargs or (args[0] if len(args) == 1 else list(args)))

    def make_own_optimizer(self) -> optim.Optimizer:
        """Return the optimizer that `configure_optimizers` makes.

        Raises ModelError unless it makes just one.
        """
        made = importlib.import_module(f"{self._package}.core.optimizer")
        with _silent():
            optimizers, _ = made._init_optimizers_and_lr_schedulers(self.module)
        if len(optimizers) != 1 or not isinstance(optimizers[0], optim.Optimizer):
            raise ModelError(
                f"{self._name}: configure_optimizers gives {len(optimizers)} optimizers; with automatic "
                "optimization Lightning takes one"
            )
        return optimizers[0]


def _manual_step(module: Any) -> Any:
    def step(batch: Any) -> Any:
        batch = module.transfer_batch_to_device(batch, module.device, 0)
        return _run_training_step(module, batch)

    return step


def _run_training_step(module: Any, batch: Any) -> Any:
    names = [*inspect.signature(module.training_step).parameters]
    if isinstance(batch, Tensor) and unpacks_one(module.training_step, names[0]):
        batch = [batch]
    with _silent():
        return module.training_step(batch, 0) if len(names) > 1 else module.training_step(batch)


def lightning_package_of(module: object) -> str | None:
    """Return the package of an object's LightningModule base, or None if it has none."""
    for kind in type(module).__mro__:
        package = kind.__module__.rpartition(".core.")[0]
        if kind.__name__ == "LightningModule" and package in _PACKAGES:
            return package
    return None


@contextmanager
def _silent() -> Iterator[None]:
    """Silence warnings and Lightning's log messages inside the context.

    Log messages of level ERROR are kept.
    """
    with quiet(_LOGGERS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
