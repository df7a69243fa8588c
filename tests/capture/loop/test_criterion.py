"""--loss FILE.py:NAME: a loss of the user's own."""

from pathlib import Path
from typing import Any

import pytest

import planner
from planner.errors import DataFileError, ModelError, UsageError
from planner.jobs.codec import job_from_json, job_to_json
from planner.jobs.files.catalogue import load_catalogue
from planner.jobs.files.yaml_fields import ANY_SOURCE
from planner.jobs.parse import parse_loss
from planner.planning.sweep.grid import load_grid
from planner.store.fingerprint import fingerprint_of

LOSSES = """import torch
from torch import nn
from torch.nn import functional as F


def same(output, target):
    return F.cross_entropy(output, target)


def alone(output):
    return output.square().mean()


def make(alpha=2.0):
    return lambda output, target: F.cross_entropy(output, target)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(1024, 256))

    def forward(self, output, target):
        return F.cross_entropy(output, target) + self.table[0, 0]


class Centers(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(1024, 256))

    def forward(self, output, target):
        return F.cross_entropy(output, target) + self.centers.sum()


class Args:
    def __init__(self, gamma):
        pass


ready = nn.CrossEntropyLoss(weight=torch.ones(128))
number = lambda output, target: 3.0
three = lambda a, b, c: a
"""
NET = """from torch import nn


def build():
    return nn.Linear(64, 128)
"""
MIB = 1.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "losses.py").write_text(LOSSES)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def estimated(folder: Path, loss: str, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"input": "64", "target": "scalar:int64", "gpu": "L4"} | options
    return planner.estimate(f"{folder / 'net.py'}:build", 8, loss=loss, **given).to_dict()


def code(folder: Path, name: str) -> str:
    return f"{folder / 'losses.py'}:{name}"


@pytest.mark.parametrize("name", ["same", "make"])
def test_a_function_is_the_loss(folder: Path, name: str) -> None:
    """A function of output and target, or one that a factory gives, is traced as if written into the loop."""
    own, builtin = estimated(folder, code(folder, name)), estimated(folder, "cross_entropy")
    assert own["job"]["loss"] == code(folder, name)
    for key in ("peak_allocated_mib", "peak_reserved_mib", "end_allocated_mib", "breakdown_mib"):
        assert own[key] == builtin[key]


def test_a_loss_of_the_output_alone_needs_no_target(folder: Path) -> None:
    """Without a target it runs; one that the model's source gives is not copied, and the answer notes it."""
    answer = estimated(folder, code(folder, "alone"), target=None)
    assert answer["job"]["target"] is None
    answer = estimated(folder, code(folder, "alone"))
    assert any("takes the output alone: no target is copied" in one for one in answer["assumptions"])


@pytest.mark.parametrize(("name", "copies"), [("Weighted", 1), ("Centers", 1)])
def test_what_a_criterion_holds_is_memory(folder: Path, name: str, copies: int) -> None:
    """Buffers and parameters of the criterion are on the GPU; its parameters are trained with the model's."""
    own, builtin = estimated(folder, code(folder, name)), estimated(folder, "cross_entropy")
    more = own["breakdown_mib"]["parameters"] - builtin["breakdown_mib"]["parameters"]
    assert more == pytest.approx(copies * MIB, abs=0.002)
    trained = "of the loss" in " ".join(own["assumptions"])
    assert trained is (name == "Centers")
    adam = estimated(folder, code(folder, name), optimizer="adam")["end_allocated_mib"]
    other = estimated(folder, "cross_entropy", optimizer="adam")["end_allocated_mib"]
    assert adam - other == pytest.approx(4 * MIB if trained else MIB, abs=0.01)


def test_a_module_of_the_file_is_used_as_it_is(folder: Path) -> None:
    """An instance that stands in the file is the loss, with its buffers."""
    assert estimated(folder, code(folder, "ready"))["peak_allocated_mib"] > 0


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("number", ModelError, "gives a float; return the loss as a tensor"),
        ("three", UsageError, r"takes 3 arguments; write it as \(output, target\) or \(output\)"),
        ("Args", ModelError, "its construction fails: TypeError: .*gamma"),
        ("some", UsageError, "losses.py has no loss 'some'; the nearest: same"),
    ],
)
def test_what_is_no_loss_is_refused(folder: Path, name: str, kind: type[Exception], message: str) -> None:
    """Each refusal states what is wrong with which name."""
    with pytest.raises(kind, match=message):
        estimated(folder, code(folder, name))


def test_a_missing_target_is_an_error(folder: Path) -> None:
    """A loss of two arguments needs a target, which only its code shows."""
    with pytest.raises(UsageError, match="takes an output and a target; give one sample, such as --target"):
        estimated(folder, code(folder, "same"), target=None)


@pytest.mark.parametrize("text", ["loss.py", "focal", "a:b"])
def test_other_texts_are_no_loss(text: str) -> None:
    """The refusal lists the known losses and the spelling of code."""
    with pytest.raises(UsageError, match="or FILE.py:NAME"):
        parse_loss(text)


@pytest.mark.slow
def test_every_way_to_plan_takes_it(folder: Path, tmp_path: Path) -> None:
    """A cached, a saved and an isolated trace, the table of GPUs and an explanation agree."""
    plain = estimated(folder, code(folder, "Weighted"))["peak_reserved_mib"]
    saved = tmp_path / "a.trace"
    cache = {"cache": tmp_path / "kept"}
    for options in ({"isolate": True}, cache, cache | {"save_trace": saved}):
        assert estimated(folder, code(folder, "Weighted"), **options)["peak_reserved_mib"] == plain
    job: dict[str, Any] = {"input": "64", "target": "scalar:int64", "loss": code(folder, "Weighted")}
    assert planner.estimate(trace=saved, batch=8, gpu="L4").to_dict()["peak_reserved_mib"] == plain
    model = f"{folder / 'net.py'}:build"
    assert planner.explain(model, 8, gpu="L4", **job).to_dict()["estimate"]["peak_reserved_mib"] == plain
    assert planner.gpus(model, 8, filter="L4", **job).to_dict()["rows"]


def test_a_cached_trace_is_of_one_text_of_the_loss(folder: Path) -> None:
    """The key of a job includes the loss's file; there is none if that file may read anything."""
    job = planner.Job.create(f"{folder / 'net.py'}:build", loss=code(folder, "same"))
    before = fingerprint_of(job)
    (folder / "losses.py").write_text(LOSSES.replace("square", "abs"))
    assert before is not None
    assert fingerprint_of(job) != before
    (folder / "losses.py").write_text(LOSSES + "\nwords = open('words')\n")
    assert fingerprint_of(job) is None


def test_a_job_reads_back() -> None:
    """The name survives JSON."""
    job = planner.Job.create("resnet50", loss="a.py:focal")
    assert job_from_json(job_to_json(job)) == job


def test_files_name_code_where_they_are_allowed_to(folder: Path) -> None:
    """A catalogue and a sweep run a loss's code with --allow-code alone, in models and in recipes."""
    catalogue = folder / "models.yaml"
    catalogue.write_text(
        "net:\n  source: torchvision:resnet18\n  about: one\n  loss: losses.py:same\n  target: scalar:int64\n"
    )
    with pytest.raises(DataFileError, match="would run code; --allow-code"):
        load_catalogue(catalogue)
    assert load_catalogue(catalogue, ANY_SOURCE)["net"].job.loop.loss == "losses.py:same"
    sweep = folder / "sweep.yaml"
    sweep.write_text("about: one\nmodels: [resnet50]\nrecipes: {a: {loss: 'losses.py:same'}}\ngpus: [L4]\n")
    with pytest.raises(DataFileError, match="would run code; --allow-code"):
        load_grid(sweep, load_catalogue())
    assert load_grid(sweep, load_catalogue(), ANY_SOURCE).recipes[0].options["loss"] == "losses.py:same"


def test_memtracker_says_that_it_cannot(folder: Path) -> None:
    """The other estimators that run a loop refuse code."""
    with pytest.raises(ModelError, match="is code, which neither MemTracker nor a run on a GPU calls"):
        planner.estimate(
            f"{folder / 'net.py'}:build", 8, input="64", target="scalar:int64",
            loss=code(folder, "same"), method="memtracker",
        )  # fmt: skip
