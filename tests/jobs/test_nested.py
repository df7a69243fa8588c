"""Inputs and targets that hold several tensors, by the names that a user gives them."""

from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cli import run
from planner.errors import UsageError
from planner.jobs import Job, parse_tensor_spec
from planner.jobs.codec import job_from_json, job_to_json
from planner.jobs.files.catalogue import load_catalogue
from planner.jobs.nested import nest_inputs, nest_target

pytestmark = pytest.mark.slow


def nested(*texts: str) -> Any:
    """The arguments of these inputs, each tensor as its own text."""
    return nest_inputs((parse_tensor_spec(text).keyword, text.rpartition("=")[2]) for text in texts)


@pytest.mark.parametrize(
    ("texts", "arguments"),
    [
        (["3x4", "5"], (("3x4", "5"), {})),
        (["ids=8:int64", "3"], (("3",), {"ids": "8:int64"})),
        (["batch.image=3x4", "batch.mask=4"], ((), {"batch": {"image": "3x4", "mask": "4"}})),
        (["0.0=3", "0.1=4", "5"], ((("3", "4"), "5"), {})),
        (["5", "1.image=3"], (("5", {"image": "3"}), {})),
        (["0[0]=3", "0[1]=4"], ((["3", "4"],), {})),
        (["pair.1=3", "pair.0=4"], ((), {"pair": ("4", "3")})),
        (["x.views[0].left=3", "x.views[0].right=4"], ((), {"x": {"views": [{"left": "3", "right": "4"}]}})),
        (["x.pixel-values=3"], ((), {"x": {"pixel-values": "3"}})),
    ],
)
def test_names_say_where_a_tensor_goes(texts: list[str], arguments: Any) -> None:
    """Dots are entries of dicts and items of tuples, brackets items of lists, numbers in front positions."""
    assert nested(*texts) == arguments


@pytest.mark.parametrize(
    "text", ["3x4", "ids=8:int64", "b.image=3x4", "0.1=4", "0[1].mask=4:bool", "p[0]=scalar"]
)
def test_a_name_is_its_own_text(text: str) -> None:
    """A spelling that is read is written as it was, in text and in JSON."""
    assert str(parse_tensor_spec(text)) == text
    job = Job.create("m", inputs=(parse_tensor_spec(text),), targets=(parse_tensor_spec("boxes=4"),))
    assert job_from_json(job_to_json(job)) == job


@pytest.mark.parametrize(
    "text", ["a b=3", ".a=3", "a.=3", "a..b=3", "a[=3", "a[x]=3", "a[1]b=3", "1a=3", "class.x=3"]
)
def test_no_name_is_refused(text: str) -> None:
    """A name that is none states how one is written."""
    with pytest.raises(UsageError, match="is no argument name; write it like"):
        parse_tensor_spec(text)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a=3", "a=4"], "'a' is given twice, or is a tensor and holds others"),
        (["a=3", "a.b=4"], "'a' is given twice, or is a tensor and holds others"),
        (["a.b=3", "a.0=4"], "'a' has entries by name and by number"),
        (["a.0=3", "a[1]=4"], "'a' has entries by name and by number, or of tuple and list"),
        (["a.0=3", "a.2=4"], "a.1 is missing, of 2 that are given"),
        (["a[1]=3"], r"a\[0\] is missing"),
        (["1.x=3"], "argument 0 is missing"),
    ],
)  # fmt: skip
def test_names_that_do_not_agree_are_refused(texts: list[str], message: str) -> None:
    """The refusal names the argument."""
    with pytest.raises(UsageError, match=f"net.py:Net: --input: {message}"):
        planner.estimate("net.py:Net", 1, input=texts, target="scalar:int64")


def test_targets_are_named_too() -> None:
    """Several tensors make a dict, or by numbers a tuple; without names they cannot be matched."""
    assert nest_target([("boxes", 1), ("labels", 2)]) == {"boxes": 1, "labels": 2}
    assert nest_target([("0", 1), ("1.mask", 2)]) == (1, {"mask": 2})
    with pytest.raises(UsageError, match="each needs a name"):
        nest_target([(None, 1), ("a", 2)])


NET = """import torch
from torch import nn


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 32), nn.Linear(16, 32)

    def forward(self, x, y):
        return self.left(x) + self.right(y)


class Dict(Plain):
    def forward(self, batch):
        assert type(batch) is dict
        return super().forward(batch["x"], batch["y"])


class Pair(Plain):
    def forward(self, pair):
        assert type(pair) is tuple
        return super().forward(*pair)


class List(Plain):
    def forward(self, views):
        assert type(views) is list
        return super().forward(*views)


def loss(output, target):
    return nn.functional.cross_entropy(output, target["label"]) + target["size"].mean()
"""
NAMES = {
    "Dict": ["batch.x=64", "batch.y=16"],
    "Pair": ["0.0=64", "0.1=16"],
    "List": ["views[0]=64", "views[1]=16"],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path / "net.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_nested_batch_takes_what_a_plain_one_does(file: Path, name: str, tmp_path: Path) -> None:
    """Fresh, cached, isolated and saved, the plan is that of the model with an argument for each tensor."""
    given: dict[str, Any] = {"target": "scalar:int64", "gpu": "L4"}
    plain = planner.estimate(f"{file}:Plain", 64, input=["64", "16"], **given).to_dict()
    saved = tmp_path / "a.trace"
    options: tuple[dict[str, Any], ...] = (
        {"save_trace": saved},
        {"isolate": True},
        {"cache": tmp_path / "kept"},
    )
    for more in options:
        answer = planner.estimate(f"{file}:{name}", 64, input=NAMES[name], **given, **more).to_dict()
        assert answer["job"]["inputs"] == NAMES[name]
        assert answer["breakdown_mib"] == plain["breakdown_mib"]
    again = planner.estimate(trace=saved, batch=64, gpu="L4").to_dict()
    assert (again["job"]["inputs"], again["breakdown_mib"]) == (NAMES[name], plain["breakdown_mib"])


def test_a_nested_target_goes_to_a_loss_that_takes_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line has --target for each tensor; the losses that compare with one refuse several."""
    command = ["estimate", "--model", f"{file}:Plain", "--batch", "8", "--input", "64", "--input", "16"]
    targets = ["--target", "label=scalar:int64", "--target", "size=scalar"]
    assert run([*command, *targets, "--loss", f"{file}:loss", "--no-cache"]) == 0
    assert "target label=scalar:int64 and size=scalar" in " ".join(capsys.readouterr().out.split())
    assert run([*command, *targets]) == 2
    assert "compares with one tensor, not with label=scalar:int64" in capsys.readouterr().err


def test_catalogues_and_sweeps_name_them_too(tmp_path: Path) -> None:
    """YAML has the names of the options; a target of several is a list."""
    path = tmp_path / "models.yaml"
    path.write_text(
        "net:\n  source: net.py:Dict\n  about: one\n  inputs: [batch.x=64, batch.y=16]\n"
        "  target: [label=scalar:int64, size=scalar]\n  loss: net.py:loss\n"
    )
    job = load_catalogue(path, ("file",))["net"].job
    assert [str(spec) for spec in (*job.samples.inputs, *job.samples.targets)] == [
        "batch.x=64", "batch.y=16", "label=scalar:int64", "size=scalar",
    ]  # fmt: skip
