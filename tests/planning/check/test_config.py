"""`[tool.planner]`: what is read, and what is refused with file, line and key."""

from pathlib import Path

import pytest

from planner.errors import UsageError
from planner.jobs.files.catalogue import load_catalogue
from planner.jobs.parse import SOURCES
from planner.planning.check import CheckConfig, FailOn, Headroom, find_config, load_config

HEAD = '[tool.planner]\ngpus = ["RTX 4090", 24000]\nbudget = "16GiB"\nfail_on = "tight"\n'
JOB = '[tool.planner.jobs.one]\nmodel = "resnet50"\n'


def load(folder: Path, text: str) -> CheckConfig:
    path = folder / "pyproject.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, load_catalogue(), SOURCES)


def test_what_the_table_says_counts_for_every_job(tmp_path: Path) -> None:
    """A job takes what it does not say itself from the table, and its batch from the catalogue."""
    own = 'batch = 8\ngpus = ["L4"]\nbudget = "500MB"\nheadroom = "1GiB"\nconfidence = 0.9\n'
    own += 'optimizer = "adamw"\n'
    config = load(tmp_path, f"{HEAD}{JOB}{JOB.replace('one', 'two')}{own}")
    one, two = config.jobs
    assert config.fail_on is FailOn.TIGHT
    assert [device.name for device in one.devices if device] == [
        "RTX 4090 24GB",
        "generic GPU of 24000 MiB",
    ]
    assert (one.budget_bytes, one.confidence, one.headroom) == (2**34, None, Headroom(share=0.05))
    assert (one.line, one.batch) == (5, load_catalogue()["resnet50"].batch)
    assert [device.name for device in two.devices if device] == ["L4 24GB"]
    assert (two.budget_bytes, two.confidence, two.headroom) == (5 * 10**8, 0.9, Headroom(2**30))
    assert (two.line, two.batch, two.job.loop.optimizer) == (7, 8, "adamw")


def test_a_budget_alone_needs_no_gpu(tmp_path: Path) -> None:
    """A job with a budget and without GPUs is planned once, for any GPU."""
    (job,) = load(tmp_path, f'[tool.planner]\nbudget = "1GiB"\n{JOB}').jobs
    assert job.devices == (None,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[tool]\n", "there is no [tool.planner]"),
        ("[tool.planner]\n", "line 1, tool.planner: missing jobs"),
        ("[tool.planner]\njobs = {}\n", "line 2, tool.planner.jobs: expected a job"),
        (f"{HEAD}gpu = 'L4'\n{JOB}", "line 5, tool.planner.gpu: unknown key; known are"),
        (f"{HEAD}{JOB}optimiser = 'sgd'\n", "line 7, tool.planner.jobs.one.optimiser: unknown key"),
        (f"{HEAD}{JOB}optimizer = 'sdg'\n", "line 7, tool.planner.jobs.one.optimizer: "),
        (f"{HEAD}{JOB}batch = 0\n", "line 7, tool.planner.jobs.one.batch: "),
        (f"{HEAD}{JOB}batch = 1.5\n", "line 7, tool.planner.jobs.one.batch: "),
        (f"{HEAD}{JOB}batch = '8'\n", "line 7, tool.planner.jobs.one.batch: "),
        (f"{HEAD}{JOB}confidence = 1.0\n", "line 7, tool.planner.jobs.one.confidence: "),
        (f"{HEAD}{JOB}budget = '16'\n", "line 7, tool.planner.jobs.one.budget: expected a size such as"),
        (f"{HEAD}{JOB}budget = '5%'\n", "line 7, tool.planner.jobs.one.budget: expected a size"),
        (f"{HEAD}{JOB}headroom = '100%'\n", "line 7, tool.planner.jobs.one.headroom: expected less"),
        (f"{HEAD}{JOB}gpus = []\n", "line 7, tool.planner.jobs.one.gpus: the list is empty"),
        (f"{HEAD}{JOB}gpus = ['RTX 9999']\n", "line 7, tool.planner.jobs.one.gpus[0]: "),
        (f"{HEAD}{JOB}gpus = ['L4', 'l4']\n", "jobs.one.gpus[1]: L4 24GB occurs twice"),
        (f"{HEAD}{JOB}grad_scaler = 1979-05-27\n", "line 7, tool.planner.jobs.one.grad_scaler: "),
        (f"{HEAD}fail_on = 1\n{JOB}", "not TOML"),
        (JOB, "line 1, tool.planner.jobs.one: missing gpus or budget"),
        (f"{HEAD}[tool.planner.jobs.one]\nbatch = 1\n", "line 5, tool.planner.jobs.one: missing model"),
        (f"{HEAD}[tool.planner.jobs.one]\nmodel = 'resnet51'\n", "line 6, tool.planner.jobs.one.model: "),
        (f"{HEAD}[tool.planner.jobs.one]\nmodel = 'torchvision:resnet18'\n", "jobs.one: missing batch"),
        (f"{HEAD}[tool.planner.jobs.one]\nmodel = 'a.py:b'\n", "would run code; --allow-code"),
        (f"{HEAD}{JOB}loss = 'a.py:b'\n", "line 7, tool.planner.jobs.one.loss: 'a.py:b' would run code"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    """Each mistake is one line with the file, the line and the key, and wrong usage."""
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    assert expected in str(caught.value)
    assert str(tmp_path / "pyproject.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_nearest_file_with_the_table_is_found(tmp_path: Path) -> None:
    """A pyproject.toml without the table is passed on the way up."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(HEAD + JOB)
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'a'\n")
    assert find_config(inner) == tmp_path / "pyproject.toml"


def test_where_there_is_none_the_message_says_so(tmp_path: Path) -> None:
    """Without a table anywhere above, the message names --config."""
    with pytest.raises(UsageError, match="--config FILE"):
        find_config(tmp_path)
