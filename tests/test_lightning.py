"""The Lightning callback, and plans of modules that exist already."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.lightning import (
    BatchSizePlanner,
    fields_of_optimizers,
    fields_of_trainer,
)

L = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from planner.api import max_batch  # noqa: E402
from planner.errors import UsageError  # noqa: E402
from planner.events import Alloc  # noqa: E402
from planner.job import ClipGradients, Loss, Optimizer, OptimizerImpl, Precision  # noqa: E402
from planner.trace import trace  # noqa: E402
from planner.trace.live import copy_weightless, live_job, read_live_model  # noqa: E402

WIDTH = 1000


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2000), nn.ReLU(), nn.Linear(2000, 10))


class Loss3(nn.Module):
    """The same network with the loss as its output, as a plan by hand has it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = network()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.module(x), y)


class Classifier(L.LightningModule):  # type: ignore[misc, name-defined]
    """A module as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4
        self.network = network()
        self.seen: list[int] = []

    def train_dataloader(self) -> DataLoader[Any]:
        data = TensorDataset(torch.zeros(64, WIDTH), torch.zeros(64, dtype=torch.int64))
        return DataLoader(data, batch_size=self.batch_size)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        self.seen.append(len(x))
        loss = F.cross_entropy(self.network(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class OnItsDevice(Classifier):
    """A module that makes a tensor of 16 MiB where it runs itself."""

    device_name = ""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        place = self.device if not self.device_name else torch.device(self.device_name)
        wide = torch.ones(2048, 2048, device=place)
        return super().training_step(batch, index) + wide.sum()


class OnTheGpu(OnItsDevice):
    """The same with the device by its name."""

    device_name = "cuda"


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "barebones": False, "accelerator": "cpu", "max_steps": 1}
    return L.Trainer(callbacks=list(callbacks), **(quiet | options))


def test_callback_sets_the_batch_size_that_a_plan_by_hand_gives() -> None:
    """The batch that is trained is the largest of the same job planned by hand, rounded down."""
    module, callback = Classifier(), BatchSizePlanner(gpu_mib=1500, multiple_of=8)
    trainer(callback).fit(module)
    by_hand = max_batch(
        Loss3, input=[f"{WIDTH}", "scalar:int64"], loss="output", optimizer="adamw", gpu_mib=1500
    ).max_batch
    assert callback.result is not None
    assert callback.result.max_batch == by_hand > 8
    assert callback.batch_size == module.batch_size == by_hand - by_hand % 8
    assert module.seen == [min(64, module.batch_size)]


def test_data_module_gets_the_batch_size() -> None:
    """Where a data module holds the batch size, it is set there."""

    class Data(L.LightningDataModule):  # type: ignore[misc, name-defined]
        batch_size = 2

        def train_dataloader(self) -> DataLoader[Any]:
            data = TensorDataset(torch.zeros(8, WIDTH), torch.zeros(8, dtype=torch.int64))
            return DataLoader(data, batch_size=self.batch_size)

    module, data, callback = Classifier(), Data(), BatchSizePlanner(gpu_mib=1500)
    del module.batch_size
    trainer(callback).fit(module, datamodule=data)
    assert data.batch_size == callback.batch_size
    assert module.seen == [8]


def test_training_goes_on_as_without_the_callback() -> None:
    """Planning changes neither weights, nor random numbers, nor the module's mode."""

    def weights_after(*callbacks: Any) -> torch.Tensor:
        torch.manual_seed(0)
        module = Classifier()
        module.batch_size = 64
        trainer(*callbacks).fit(module)
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    assert torch.equal(weights_after(BatchSizePlanner(gpu_mib=40000)), weights_after())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda module: delattr(module, "batch_size"),
            "neither the module nor the data module has 'batch_size'",
        ),
        (lambda module: setattr(module, "automatic_optimization", False), "manual optimization"),
        (
            lambda module: setattr(
                module, "configure_optimizers", lambda: torch.optim.Rprop(module.parameters())
            ),
            "optimizer Rprop is not planned; use one of SGD, Adam",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(change: Any, message: str) -> None:
    """A module that the callback cannot plan ends with one sentence before training."""
    module = Classifier()
    loader = module.train_dataloader()
    change(module)
    module.train_dataloader = lambda: loader  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match=message):
        trainer(BatchSizePlanner(gpu_mib=1500)).fit(module)
    assert module.seen == []


def test_loader_passed_to_fit_is_refused() -> None:
    """The batch size of a finished data loader cannot be changed."""
    module = Classifier()
    with pytest.raises(MisconfigurationException, match=r"passed to fit\(\) cannot be changed"):
        trainer(BatchSizePlanner(gpu_mib=1500)).fit(module, module.train_dataloader())


def test_nothing_fits() -> None:
    """Where not even one sample fits, training does not start."""
    with pytest.raises(MisconfigurationException, match="not even a batch of 1 fits"):
        trainer(BatchSizePlanner(gpu_mib=450)).fit(Classifier())


def test_fields_of_a_trainer() -> None:
    """Precision, accumulation and clipping come from the trainer."""
    mixed = trainer(precision="bf16-mixed", accumulate_grad_batches=4, gradient_clip_val=0.5)
    assert fields_of_trainer(mixed) == {
        "precision": Precision.AMP_BF16,
        "grad_scaler": False,
        "accumulate": 4,
        "clip_gradients": ClipGradients.NORM,
        "ddp": False,
    }
    with pytest.raises(UsageError, match="precision 64-true is not planned"):
        fields_of_trainer(trainer(precision="64-true"))


def test_fields_of_optimizers() -> None:
    """Every form that configure_optimizers may return gives kind and implementation."""
    parameters = list(network().parameters())
    sgd = torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, foreach=False)
    schedule = torch.optim.lr_scheduler.ConstantLR(sgd)
    expected = {"optimizer": Optimizer.NESTEROV, "optimizer_impl": OptimizerImpl.FOR_LOOP}
    for configured in (
        sgd,
        [sgd],
        ([sgd], [schedule]),
        {"optimizer": sgd, "lr_scheduler": schedule},
        [{"optimizer": sgd}],
    ):
        assert fields_of_optimizers(configured) == expected
    fused = torch.optim.Adam(parameters, fused=True)
    assert fields_of_optimizers(fused)["optimizer_impl"] is OptimizerImpl.FUSED
    with pytest.raises(UsageError, match="2 optimizers are configured"):
        fields_of_optimizers([sgd, fused])


def test_weightless_copy() -> None:
    """The copy has the structure and no values; the original keeps its weights and gradients."""
    module = network()
    module(torch.ones(1, WIDTH)).sum().backward()
    before = module.state_dict()
    copy = copy_weightless(module)
    assert [p.shape for p in copy.parameters()] == [p.shape for p in module.parameters()]
    assert all(p.is_meta and p.grad is None for p in copy.parameters())
    assert all(p.grad is not None for p in module.parameters())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"name": ["a", "b"]}, "has no tensors"),
        ((torch.zeros(2, 3), torch.zeros(3)), r"several batch sizes: \(2, 3\), \(3,\)"),
        ((torch.zeros(2, 3), torch.tensor(1.0)), r"several batch sizes: \(2, 3\), \(\)"),
    ],
)
def test_samples_without_one_batch_size(sample: object, message: str) -> None:
    """A sample batch has tensors, and they agree about the batch size."""
    with pytest.raises(UsageError, match=message):
        read_live_model(network(), sample, lambda module, batch: module(batch))


def test_sample_of_any_structure() -> None:
    """Tensors are found in mappings, lists and tuples; the rest of the batch is handed on as it was."""
    sample = {"x": torch.zeros(2, WIDTH), "more": [torch.zeros(2, dtype=torch.int64), "text"]}
    seen: list[Any] = []

    def step(module: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch)
        return F.cross_entropy(module(batch["x"]), batch["more"][0])

    model = read_live_model(network(), sample, step)
    assert [str(spec) for spec in model.inputs] == [str(WIDTH), "scalar:int64"]
    assert model.batch == 2
    result = max_batch(model.build, input=list(model.inputs), loss=Loss.OUTPUT, gpu_mib=1500)
    assert result.max_batch > 0
    assert seen[0]["more"][1] == "text"


def test_a_module_on_its_own_device_is_planned_on_the_gpu() -> None:
    """`self.device` is the CPU before a training starts, and the planned GPU in the plan."""

    def step(module: Any, batch: Any) -> torch.Tensor:
        loss = module.training_step(batch, 0)
        assert isinstance(loss, torch.Tensor)
        return loss

    sample = (torch.zeros(4, WIDTH), torch.zeros(4, dtype=torch.int64))
    for module in (OnItsDevice(), OnTheGpu()):
        live = read_live_model(module, sample, step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it logs to no trainer
            taken = trace(live_job("live", live), 4, (8, 6), lambda _, live=live: live.build())
        assert [e.fixed_bytes for e in taken.events if isinstance(e, Alloc)].count(16 * 2**20) == 3
        assert module.device.type == "cpu"
