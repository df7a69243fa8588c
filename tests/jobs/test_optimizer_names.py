"""Optimizers by name: what they stand for, and what is refused."""

from pathlib import Path

import pytest
import torch

from planner.errors import DataFileError, UsageError
from planner.jobs import Job, Optimizer, merge_job
from planner.jobs.files.catalogue import load_catalogue
from planner.jobs.files.yaml_fields import ANY_SOURCE
from planner.jobs.optimizer_names import TORCH_OPTIMIZERS, optimizer_library, parse_optimizer


def test_the_table_has_all_classes_of_torch() -> None:
    """The names are the public classes of torch.optim but for their base."""
    public = [getattr(torch.optim, name) for name in torch.optim.__all__]
    classes = [one for one in public if isinstance(one, type) and issubclass(one, torch.optim.Optimizer)]
    assert sorted(TORCH_OPTIMIZERS) == sorted({one.__name__ for one in classes} - {"Optimizer"})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("adam", Optimizer.ADAM),
        ("AdamW", Optimizer.ADAMW),
        ("torch.optim.Adafactor", Optimizer.ADAFACTOR),
        (torch.optim.RMSprop, Optimizer.RMSPROP),
        ("nadam", "torch.optim.NAdam"),
        ("torch.optim.radam", "torch.optim.RAdam"),
        (torch.optim.Muon, "torch.optim.Muon"),
        ("bitsandbytes.optim.AdamW8bit", "bitsandbytes.optim.AdamW8bit"),
        ("own.py:make", "own.py:make"),
    ],
)
def test_names(given: object, name: str) -> None:
    """Case does not matter for torch's classes, and those with a short name have one meaning."""
    assert parse_optimizer(given) == name


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            "adma",
            "--optimizer: unknown value 'adma'; the nearest: Adamax, Adam, RAdam; any class of "
            "torch.optim, a dotted name such as bitsandbytes.optim.AdamW8bit, or FILE.py:NAME",
        ),
        (3, "--optimizer: an int is refused; name yours as FILE.py:NAME, or give its class"),
        (
            type("Own", (torch.optim.SGD,), {"__module__": "__main__"}),
            "--optimizer: the class Own cannot be imported; name it as FILE.py:NAME",
        ),
    ],
)
def test_refusals(given: object, line: str) -> None:
    """What has no name is refused in one line."""
    with pytest.raises(UsageError) as caught:
        parse_optimizer(given)
    assert str(caught.value) == line


def test_arguments_belong_to_their_optimizer() -> None:
    """Arguments add up by name, and go with the optimizer that they were given for."""
    job = merge_job(Job.create("test"), {"optimizer": "adamw", "optimizer_args": [("amsgrad", True)]})
    both = merge_job(job, {"optimizer_args": [("weight_decay", 0.1)]})
    assert both.loop.optimizer_args == (("amsgrad", True), ("weight_decay", 0.1))
    assert merge_job(both, {"optimizer": "adamw"}) == both
    assert merge_job(both, {"optimizer": "NAdam"}) == both.replace(
        optimizer="torch.optim.NAdam", optimizer_args=()
    )


def test_libraries() -> None:
    """A dotted name tells the package whose version decides the traces."""
    names = (Optimizer.ADAM, "torch.optim.NAdam", "torchao.optim.AdamW4bit", "own.py:make")
    assert [optimizer_library(name) for name in names] == ["", "", "torchao", ""]


ENTRY = "net:\n  about: A test.\n  source: torchvision:resnet18\n  optimizer: {}\n"


@pytest.mark.parametrize("name", ["own.py:make", "os.system"])
def test_files_do_not_name_code(name: str, tmp_path: Path) -> None:
    """A catalogue names optimizers of known libraries alone, unless its code is allowed."""
    path = tmp_path / "models.yaml"
    path.write_text(ENTRY.format(name))
    with pytest.raises(DataFileError, match="would run code; --allow-code lets files name code"):
        load_catalogue(path)
    assert load_catalogue(path, ANY_SOURCE)["net"].job.loop.optimizer == name


def test_catalogues_have_optimizers_and_their_arguments(tmp_path: Path) -> None:
    """An entry has an optimizer by any name, and its arguments."""
    path = tmp_path / "models.yaml"
    path.write_text(ENTRY.format("torchao.optim.AdamW8bit") + "  optimizer_arg: {block_size: 128}\n")
    job = load_catalogue(path)["net"].job
    assert (job.loop.optimizer, job.loop.optimizer_args) == (
        "torchao.optim.AdamW8bit",
        (("block_size", 128),),
    )
