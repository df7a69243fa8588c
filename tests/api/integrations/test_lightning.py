"""The Lightning callback, and plans of modules that exist already."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner.api.integrations.lightning import BatchSizePlanner

L = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import Precision as PrecisionPlugin  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from planner.api.integrations.lightning_loop import fields_of_trainer, notes_of_trainer  # noqa: E402
from planner.api.max_batch import max_batch  # noqa: E402
from planner.capture.models.live.job import copy_weightless, live_job, read_live_model  # noqa: E402
from planner.capture.session import record  # noqa: E402
from planner.errors import UsageError  # noqa: E402
from planner.jobs import ClipGradients, Loss, Precision, ZeroGrad  # noqa: E402
from planner.program.events import Alloc  # noqa: E402

WIDTH = 1000


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2000), nn.ReLU(), nn.Linear(2000, 10))


class Loss3(nn.Module):
    """A network with the loss as its output, as a plan by hand has it."""

    def __init__(self) -> None:
        super().__init__()
        self.module = network()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.module(x), y)


class Written:
    """The methods of a module as people write them."""

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
        self.log("loss", loss)  # type: ignore[attr-defined]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())  # type: ignore[attr-defined]


class Classifier(Written, L.LightningModule):  # type: ignore[misc, name-defined]
    """A module as people write them."""


class OnItsDevice(Classifier):
    """A module that makes a tensor of 16 MiB where it runs itself."""

    device_name = ""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        place = self.device if not self.device_name else torch.device(self.device_name)
        wide = torch.ones(2048, 2048, device=place)
        return super().training_step(batch, index) + wide.sum()


class OnTheGpu(OnItsDevice):
    """A module that makes this tensor on a device given by name."""

    device_name = "cuda"


def trainer(*callbacks: Any, package: Any = L, **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "max_steps": 1, "max_epochs": 4}
    return package.Trainer(callbacks=list(callbacks), **(quiet | options))


def test_callback_sets_the_batch_size_that_a_plan_by_hand_gives() -> None:
    """The batch that is trained is the largest of the same job planned by hand, rounded down."""
    module, callback = Classifier(), BatchSizePlanner(gpu_mib=1500, multiple_of=8)
    trainer(callback).fit(module)
    by_hand = max_batch(
        Loss3, input=[f"{WIDTH}", "scalar:int64"], loss="output", optimizer="adamw", gpu_mib=1500,
        zero_grad="before-backward",
    )  # fmt: skip
    assert callback.result is not None
    assert callback.result.max_batch == by_hand.max_batch > 8
    assert callback.result.comfortable_batch == by_hand.comfortable_batch
    assert callback.batch_size == module.batch_size == by_hand.comfortable_batch // 8 * 8
    assert module.seen == [min(64, module.batch_size)]


def test_modules_of_either_package_get_the_same_batch() -> None:
    """A module and trainer of `pytorch_lightning` are planned as those of `lightning.pytorch`."""
    old = pytest.importorskip("pytorch_lightning")

    class Older(Written, old.LightningModule):  # type: ignore[misc, name-defined]
        pass

    planned, older = BatchSizePlanner(gpu_mib=1500), BatchSizePlanner(gpu_mib=1500)
    trainer(planned).fit(Classifier())
    trainer(older, package=old).fit(Older())
    assert planned.batch_size == older.batch_size is not None


def test_data_module_gets_the_batch_size() -> None:
    """A data module that holds the batch size gets it."""

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


def remove_batch_size(module: Any) -> None:
    del module.batch_size


def fail_on_copies(module: Any) -> None:
    module.network[0].register_forward_hook(lambda layer, given, out: int("x") if out.is_meta else out)


def refuse_new_schedules(module: Any) -> None:
    answers = iter([module.configure_optimizers()])  # the second call finds none

    def configure() -> Any:
        assert module.trainer.estimated_stepping_batches  # which loads the data
        return next(answers)

    module.configure_optimizers = configure


def read_only_size(module: Any) -> None:
    del module.batch_size
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"batch_size": property(lambda self: 4)})


NO_PLAN = [
    (refuse_new_schedules, "StopIteration: no message"),
    (read_only_size, "AttributeError: "),
    (remove_batch_size, "neither the module nor the data module has 'batch_size'"),
    (fail_on_copies, "ModelError|fails at batch"),
]


@pytest.mark.parametrize(("change", "message"), NO_PLAN)
def test_a_plan_that_cannot_be_made_warns_and_trains(change: Any, message: str) -> None:
    """A plan that fails is one warning, and training runs with the batch that it has."""
    module, callback = Classifier(), BatchSizePlanner(gpu_mib=1500)
    callback.batch_size = 8  # of an earlier fit
    loader = module.train_dataloader()
    change(module)
    module.train_dataloader = lambda: loader  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=f"no plan, batch_size stays as it is: .*({message})"):
        trainer(callback).fit(module)
    assert module.seen == [4]
    assert callback.result is None and callback.batch_size is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "64-true"}, "precision 64-true is not planned; use one of 32-true"),
        ({"callbacks": [BackboneFinetuning(9)]}, "BackboneFinetuning is not planned: it trains more layers"),
        ({"plugins": [type("Mine", (PrecisionPlugin,), {})()]}, "plugins: Mine is not planned"),
    ],
)
def test_settings_that_are_refused_leave_the_batch_alone(options: Any, message: str) -> None:
    """A trainer with settings that no plan covers trains as without the callback, after one warning."""
    module = Classifier()
    module.backbone = nn.Linear(2, 2)
    callbacks = options.pop("callbacks", [])
    with pytest.warns(UserWarning, match=message):
        trainer(BatchSizePlanner(gpu_mib=1500), *callbacks, **options).fit(module)
    assert module.batch_size == 4
    assert len(module.seen) == 1


def test_manual_optimization_warns() -> None:
    """A module that optimizes by hand is not planned."""

    class Manual(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            self.seen.append(len(batch[0]))
            self.optimizers().step()

    module = Manual()
    with pytest.warns(UserWarning, match="manual optimization"):
        trainer(BatchSizePlanner(gpu_mib=1500)).fit(module)
    assert module.seen == [4]


def test_loader_passed_to_fit_warns() -> None:
    """The batch size of a finished data loader cannot be changed, and training goes on with it."""
    module = Classifier()
    with pytest.warns(UserWarning, match=r"passed to fit\(\) cannot be changed"):
        trainer(BatchSizePlanner(gpu_mib=1500)).fit(module, module.train_dataloader())
    assert module.seen == [4]


def test_nothing_fits() -> None:
    """If not even one sample fits, a warning comes before training fails."""
    module = Classifier()
    with pytest.warns(UserWarning, match="not even a batch of 1 fits"):
        trainer(BatchSizePlanner(gpu_mib=450)).fit(module)
    assert module.batch_size == 4


class Reader(Classifier):
    """A step that reads the trainer's state and logs in every usual way."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        trainer = self.trainer
        share = trainer.current_epoch / trainer.max_epochs + index / trainer.num_training_batches
        assert trainer.datamodule is None
        assert trainer.training and trainer.is_global_zero
        rate = self.optimizers().param_groups[0]["lr"]
        self.log_dict({"rate": rate, "step": float(self.global_step)})
        for logger in self.loggers:
            logger.experiment.add_scalar("share", share, self.global_step)
        return super().training_step(batch, index)


def test_a_step_that_reads_the_trainer_is_planned() -> None:
    """Epochs, counts, ranks, learning rates and logs in a training step change nothing of its plan."""
    planned = []
    for kind in (Classifier, Reader):
        callback = BatchSizePlanner(gpu_mib=1500)
        trainer(callback).fit(kind())
        planned.append(callback.batch_size)
    assert planned[0] == planned[1] is not None


def test_a_step_that_needs_the_trainer_itself_warns() -> None:
    """A step that takes a module from the trainer cannot be planned; the warning names what it reads."""

    class Greedy(Classifier):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            assert self.trainer.lightning_module is self
            return super().training_step(batch, index)

    with pytest.warns(UserWarning, match="training_step reads trainer.lightning_module"):
        trainer(BatchSizePlanner(gpu_mib=1500)).fit(Greedy())


def test_schedules_are_made_for_the_new_batch_size() -> None:
    """A schedule over the estimated steps, which loads the data early, is that of the planned batch."""

    class Scheduled(Classifier):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Scheduled()
    trainer(BatchSizePlanner(gpu_mib=1500), max_steps=-1, max_epochs=1).fit(module)
    assert module.seen == [64]
    assert module.steps == 1


def peak(*callbacks: Any, module: Any = None, **options: Any) -> dict[str, float]:
    """Return the breakdown of the plan's batch under a GPU without bounds that matter."""
    callback = BatchSizePlanner(allocator_cap_mib=900)
    trainer(callback, *callbacks, **options).fit(Classifier() if module is None else module)
    assert callback.result is not None and callback.result.plan.at_max is not None
    return dict(callback.result.to_dict()["at_max"]["breakdown_mib"])


def assumptions(*callbacks: Any, module: Any = None, **options: Any) -> str:
    callback = BatchSizePlanner(gpu_mib=1500)
    trainer(callback, *callbacks, **options).fit(Classifier() if module is None else module)
    assert callback.result is not None
    notes = callback.result.to_dict()["at_max"]["assumptions"]
    assert all(" ".join(one.split()) in " ".join(str(callback.result).split()) for one in notes[-2:])
    return " | ".join(notes)


def test_weight_averages_are_planned_where_they_are() -> None:
    """An average on the model's device takes the weights once more, one on the CPU nothing."""
    without = peak()["optimizer"]
    assert peak(EMAWeightAveraging(device="cpu"))["optimizer"] == without
    weights = peak()["parameters"]
    assert peak(EMAWeightAveraging())["optimizer"] == pytest.approx(without + weights, rel=0.01)
    assert "moving average of parameters and buffers is kept on the GPU" in assumptions(EMAWeightAveraging())


def test_accumulation_schedules_are_planned_at_their_most() -> None:
    """The most micro-batches of any epoch are planned, also beyond 100, and the answer names them."""
    notes = assumptions(GradientAccumulationScheduler({0: 1, 3: 300}))
    assert "planned for the most micro-batches of its schedule, 300" in notes
    assert "of the 300 micro-batches in each step" in notes


def test_settings_that_are_not_planned_are_named() -> None:
    """Callbacks and switches whose memory is not counted stand among the assumptions, and are warned of."""

    class Mine(Callback):  # type: ignore[misc]
        pass

    average = StochasticWeightAveraging(0.1, device="cuda")
    with pytest.warns(UserWarning, match="Mine: what a callback of your own keeps"):
        notes = assumptions(Mine(), average, detect_anomaly=True)
    for name in ("Mine: what a callback", "StochasticWeightAveraging: an averaged model", "detect_anomaly"):
        assert name in notes


def test_validation_is_planned() -> None:
    """A module with a validation loop is planned with passes without gradients between the steps."""

    class Validated(Classifier):
        def validation_step(self, batch: Any, index: int) -> None:
            self.log("seen", float(len(batch)))

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    note = "planned by its own step, on batches of as many samples as the training's: 1000, scalar"
    assert note in assumptions(module=Validated())
    assert "validation" not in assumptions(module=Validated(), limit_val_batches=0)


def test_compiled_parts_are_planned_as_eager_and_named() -> None:
    """A compiled submodule plans, and the answer notes that it is planned as eager code."""
    module = Classifier()
    module.network[0].compile(backend="eager")
    assert "torch.compile is planned as eager code" in assumptions(module=module)


def test_a_compiled_lightning_module_is_planned_and_named() -> None:
    """A whole module that was given to torch.compile plans as the module itself, and the answer notes it."""

    class Quiet(Classifier):
        """Without a log, which dynamo cannot follow."""

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

    planned = []
    for module in (Quiet(), torch.compile(Quiet(), backend="eager")):
        callback = BatchSizePlanner(gpu_mib=1500)
        trainer(callback).fit(module)
        assert callback.result is not None
        planned.append((callback.batch_size, "torch.compile is planned as eager" in str(callback.result)))
    assert planned == [(planned[0][0], False), (planned[0][0], True)]


def test_random_numbers_are_those_without_the_callback() -> None:
    """The data is shuffled as it would be without the plan."""

    class Shuffled(Classifier):
        def train_dataloader(self) -> DataLoader[Any]:
            data = TensorDataset(torch.arange(64.0).repeat(WIDTH, 1).T, torch.zeros(64, dtype=torch.int64))
            return DataLoader(data, batch_size=8, shuffle=True)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.first = batch[0][:, 0]
            return super().training_step(batch, index)

    def first(*callbacks: Any) -> torch.Tensor:
        torch.manual_seed(0)
        module = Shuffled()
        trainer(*callbacks).fit(module)
        return module.first

    assert torch.equal(first(BatchSizePlanner(gpu_mib=1500)), first())


def test_fields_of_a_trainer() -> None:
    """Precision, accumulation and clipping come from the trainer."""
    mixed = trainer(precision="bf16-mixed", accumulate_grad_batches=4, gradient_clip_val=0.5)
    assert fields_of_trainer(mixed) == {
        "precision": Precision.AMP_BF16,
        "grad_scaler": False,
        "zero_grad": ZeroGrad.BEFORE_BACKWARD,
        "accumulate": 4,
        "clip_gradients": ClipGradients.NORM,
        "ema": False,
        "ddp": False,
        "ddp_bucket_view": False,
    }
    with pytest.raises(UsageError, match="precision 64-true is not planned"):
        fields_of_trainer(trainer(precision="64-true"))


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
            taken = record(live_job("live", live), 4, (8, 6), lambda _, live=live: live.build())
        assert [e.size_bytes for e in taken.events if isinstance(e, Alloc)].count(16 * 2**20) == 3
        assert module.device.type == "cpu"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "FSDPStrategy",
            r"strategy: FSDPStrategy is not planned: it is FSDP 1; .* planner.max_batch\(network, fsdp",
        ),
        (
            "ModelParallelStrategy",
            "strategy: ModelParallelStrategy is not planned: configure_model has sharded .* --world-size 8",
        ),
    ],
)
def test_strategies_that_shard_are_refused_with_what_plans_them(name: str, words: str) -> None:
    """They have the module before any callback runs; one line says how to plan it."""
    from lightning.pytorch import strategies

    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer._accelerator_connector.strategy = getattr(strategies, name)()
    with pytest.raises(UsageError, match=words):
        notes_of_trainer(trainer)


class Segments(Classifier):
    """A module that trains on crops and validates on whole images, with a loader of its own for each."""

    side, follows = 64, True

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 5, 1))

    def images(self, side: int, batch: int) -> DataLoader[Any]:
        x = torch.zeros(1, 3, side, side).expand(64, -1, -1, -1)
        return DataLoader(TensorDataset(x, torch.zeros(64, dtype=torch.int64)), batch_size=batch)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.images(16, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.images(self.side, self.batch_size if self.follows else 2)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.network(batch[0]).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        assert len(x) == len(y)
        self.log("val", self.network(x).mean())


def planned(module: Any, **options: Any) -> Any:
    """Return the plan of a module that does not train afterwards."""
    callback = BatchSizePlanner(gpu_mib=1500)
    trainer(callback, max_steps=0, num_sanity_val_steps=0, **options).fit(module)
    return callback


@pytest.mark.slow
def test_validation_is_planned_with_its_own_data_and_step() -> None:
    """Whole images of 64 pixels take more than crops of 16, and so does a batch that follows the training."""
    of = {}
    for side, follows in ((16, True), (64, True), (64, False)):
        module = Segments()
        module.side, module.follows = side, follows
        of[side, follows] = planned(module)
    assert of[64, True].batch_size < of[16, True].batch_size / 4
    assert of[64, False].batch_size > of[64, True].batch_size
    notes = str(of[64, True].result)
    assert "planned by its own step, on batches of as many samples as the training's: 3x64x64" in notes
    assert "on batches of 2 samples: 3x64x64" in str(of[64, False].result)


class SegmentsOfTwo(Segments):
    """One that validates on small images and on whole ones, each with its loader."""

    def val_dataloader(self) -> Any:
        return {"small": self.images(16, 2), "whole": self.images(64, self.batch_size)}

    def validation_step(self, batch: Any, index: int, dataloader_idx: int) -> None:  # type: ignore[override]
        assert dataloader_idx == int(batch[0].shape[-1] == 64)
        super().validation_step(batch, index)


def test_validation_of_several_loaders_is_planned_by_the_largest() -> None:
    """Images of 64 pixels come from the second of two loaders, whose index the step gets."""
    callback = planned(SegmentsOfTwo())
    assert callback.batch_size == planned(Segments()).batch_size
    assert "3x64x64, scalar:int64, of loader 1 of its 2, which has the largest" in " ".join(
        str(callback.result).split()
    )


def test_validation_data_that_cannot_be_read_is_named() -> None:
    """A loader that fails in a plan leaves the validation planned as training steps, with a warning."""
    module = Segments()
    module.val_dataloader = lambda: int("no data")  # type: ignore[method-assign]
    callback = BatchSizePlanner(gpu_mib=1500)
    with (
        pytest.warns(UserWarning, match="validation is planned as training steps .*invalid literal"),
        pytest.raises(ValueError, match="invalid literal"),  # of the training that follows
    ):
        trainer(callback, num_sanity_val_steps=0).fit(module)
    assert callback.batch_size is not None


def test_a_validation_that_does_not_fit_is_warned_of() -> None:
    """Images that no batch leaves room for leave the batch of the training, and a warning says so."""
    module = Segments()
    module.side, module.follows = 3000, False
    with pytest.warns(
        UserWarning, match="its evaluation does not fit at any batch of the training: give its"
    ):
        callback = planned(module)
    assert callback.batch_size > 100
