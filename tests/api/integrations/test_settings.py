"""The tables of frameworks' settings, held against the installed libraries."""

import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import planner.huggingface  # makes torchvision importable
import planner.lightning  # noqa: F401
import pytest

from planner.api.integrations import accelerate_settings, lightning_settings, transformers_settings
from planner.api.integrations.settings import Effect, Setting, notes_of, refused, stated
from planner.errors import UsageError

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")


def parameters_of(kind: type) -> set[str]:
    return {name for name in inspect.signature(kind.__init__).parameters if name != "self"}


def fields_of(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def names_in(table: tuple[Setting, ...]) -> set[str]:
    """Return the names in a table, each of which stands there once."""
    names = [setting.name for setting in table]
    assert len(set(names)) == len(names)
    return set(names)


def test_every_training_argument_has_its_effect() -> None:
    """Each field of TrainingArguments is planned, without effect, stated or refused, and no other is."""
    assert names_in(transformers_settings.SETTINGS) == fields_of(transformers.TrainingArguments)


def test_every_parameter_of_a_trainer_has_its_effect() -> None:
    """Each parameter of Lightning's Trainer stands in the table, and nothing else does."""
    import lightning.pytorch

    assert names_in(lightning_settings.TRAINER) == parameters_of(lightning.pytorch.Trainer)


def test_every_callback_and_plugin_of_lightning_has_its_effect() -> None:
    """Each callback that Lightning exports stands in its table, and each plugin is of a known kind."""
    from lightning.pytorch import plugins, strategies

    assert set(callbacks.__all__) <= names_in(lightning_settings.CALLBACKS)
    assert names_in(lightning_settings.CALLBACKS) - set(callbacks.__all__) == {"BatchSizePlanner"}
    # Any other precision is refused; of the rest, batch norm across processes are read from the strategy,
    # and the way of writing checkpoints has no effect.
    precisions = {name for name in plugins.__all__ if name.endswith("Precision")}
    others = {"AsyncCheckpointIO", "CheckpointIO", "LayerSync", "TorchCheckpointIO", "TorchSyncBatchNorm"}
    assert set(lightning_settings.PRECISION_PLUGINS) <= precisions
    assert set(plugins.__all__) - precisions == others | {"XLACheckpointIO"}
    known = {*lightning_settings.STRATEGIES, *names_in(lightning_settings.SHARDED)}
    assert known <= set(strategies.__all__)


def test_every_parameter_of_an_accelerator_has_its_effect() -> None:
    """Each parameter of Accelerator stands in the table, and nothing else does."""
    assert names_in(accelerate_settings.SETTINGS) == parameters_of(accelerate.Accelerator)


def test_every_handler_of_accelerate_has_its_effect() -> None:
    """Each handler class has a table, and those that change memory one of all their fields."""
    from accelerate.utils import dataclasses as handlers

    kinds = {
        name
        for name, kind in vars(handlers).items()
        if inspect.isclass(kind) and issubclass(kind, handlers.KwargsHandler)
    }
    plugins = {"KwargsHandler", "GradientAccumulationPlugin", "TorchDynamoPlugin"}
    assert {*accelerate_settings.HANDLERS, *names_in(accelerate_settings.OTHER_HANDLERS)} == kinds - plugins
    assert names_in(accelerate_settings.DDP) == fields_of(handlers.DistributedDataParallelKwargs)
    assert names_in(accelerate_settings.AUTOCAST) == fields_of(handlers.AutocastKwargs)
    assert names_in(accelerate_settings.FSDP) == fields_of(handlers.FullyShardedDataParallelPlugin)
    assert names_in(accelerate_settings.SCALER) == fields_of(handlers.GradScalerKwargs)


@pytest.mark.parametrize(
    "table",
    [
        transformers_settings.SETTINGS,
        transformers_settings.VALUES,
        accelerate_settings.SETTINGS,
        accelerate_settings.DDP,
        accelerate_settings.FSDP,
        lightning_settings.TRAINER,
        lightning_settings.CALLBACKS,
        lightning_settings.SHARDED,
    ],
)
def test_each_text_is_one_sentence(table: tuple[Setting, ...]) -> None:
    """A setting that is stated or refused has one line of text; any other has none."""
    for setting in table:
        has_text = setting.effect in (Effect.STATED, Effect.REFUSED)
        assert bool(setting.text) == has_text, setting.name
        assert "\n" not in setting.text


def test_the_page_names_what_is_not_planned() -> None:
    """docs/hooks.md has each setting that is named in answers, refused or planned."""
    page = (Path(__file__).parents[3] / "docs" / "hooks.md").read_text(encoding="utf-8")
    tables = (
        *transformers_settings.SETTINGS, *lightning_settings.TRAINER, *lightning_settings.CALLBACKS,
        *lightning_settings.SHARDED, *accelerate_settings.SETTINGS, *accelerate_settings.DDP,
        *accelerate_settings.FSDP,
    )  # fmt: skip
    effects = (Effect.STATED, Effect.REFUSED)
    assert [one.name for one in tables if one.effect in effects and f"| `{one.name}` |" not in page] == []


def test_notes_and_refusals() -> None:
    """A setting counts where its value is neither off nor harmless; a refusal names owner and setting."""
    table = (
        stated("cap", "planned with 25", lambda one: one.cap not in (None, 25)),
        stated("on", "x", lambda one: one.cap == 7),
    )
    assert notes_of(table, SimpleNamespace(cap=25, on=True), "Some") == ()
    assert notes_of(table, SimpleNamespace(cap=None), "Some") == ()
    assert notes_of(table, SimpleNamespace(cap=7), "Some") == ("Some: cap: planned with 25", "Some: on: x")
    with pytest.raises(UsageError, match="^Some: fsdp is not planned: it shards$"):
        notes_of((refused("fsdp", "it shards"),), SimpleNamespace(fsdp=["full"]), "Some")
