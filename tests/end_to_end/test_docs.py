"""The documentation agrees with the code: JSON keys, names of the catalogue, commands, links."""

import json
import pickle
import re
import shlex
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import planner
from planner.cli import run
from planner.cli.parser import COMMANDS, parse
from planner.errors import UsageError
from planner.jobs.files.catalogue import load_catalogue

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
JOB: Any = {"input": "16", "target": "4", "loss": "mse", "steps": 2}
VARYING = "8..24x16"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- docs/json.md


def documented() -> dict[str, list[str]]:
    """The keys of each section, by its title."""
    keys: dict[str, list[str]] = {}
    title = ""
    for line in (ROOT / "docs/json.md").read_text(encoding="utf-8").splitlines():
        if head := re.fullmatch(r"##+ `(.+)`", line):
            title = head[1].removeprefix("planner ")
        elif row := re.match(r"\| `([\w.]+)` \|", line):
            keys.setdefault(title, []).append(row[1])
    return keys


def shared(keys: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects within that have a section of their own."""
    for key, value in keys.items():
        if key in ("job", "device", "calibration", "growth") and isinstance(value, dict):
            yield key, value


def check(title: str, fields: dict[str, Any]) -> None:
    """Assert that documented and actual keys are the same, as deep as the documentation goes."""
    keys = documented()[title]
    assert sorted(key for key in keys if "." not in key) == sorted(fields), title
    for parent in dict.fromkeys(key.rpartition(".")[0] for key in keys if "." in key):
        value = fields[parent]
        inner = value[0] if isinstance(value, list) else value
        below = sorted(key.rpartition(".")[2] for key in keys if key.startswith(f"{parent}."))
        assert below == sorted(inner), parent
    for key, value in shared(fields):
        check(key, value)


def net() -> Net:
    return Net()


class Growing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.body(x))
        return self.kept[-1]


RESULTS = {
    "estimate": lambda: planner.estimate(net, 8, gpu="4090", **JOB),
    "max-batch": lambda: planner.max_batch(net, gpu_mib=600, **JOB),
    "max-batch --input SMALLEST..LARGEST": lambda: planner.max_batch(
        net, gpu_mib=600, **JOB | {"input": VARYING, "target": "8..24x4", "steps": 3, "run_steps": 4}
    ),
    "gpus": lambda: planner.gpus(net, filter="h200", **JOB),
    "explain": lambda: planner.explain(net, 8, **JOB),
    "advise": lambda: planner.advise(net, 8_000_000, gpu_mib=1500, **JOB),
}


@pytest.mark.slow
@pytest.mark.parametrize("title", RESULTS)
def test_json_of_results(title: str) -> None:
    """The documented keys of a result are its keys, in their order."""
    check(title, RESULTS[title]().to_dict())


def test_growth_is_documented() -> None:
    """A model that keeps tensors has the documented keys of growth."""
    fields = planner.estimate(Growing, 8, **JOB | {"steps": 3}).to_dict()
    assert fields["growth"] is not None
    check("estimate", fields)


@pytest.mark.slow
def test_json_of_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Keys of commands without a Python function are documented."""
    sweep, process = tmp_path / "sweep.yaml", tmp_path / "process.yaml"
    sweep.write_text("about: one\nmodels: [conv_pair]\nrecipes: {sgd: {}}\ngpus: [RTX 4090]\n")
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.planner]\ngpus = ["L4"]\njobs = {one = {model = "conv_pair", batch = 2}}\n')
    process.write_text("models: {}\nsteps:\n  - define: x=1000\n  - print: Define\n")
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(pickle.dumps({"device_traces": [[{"action": "snapshot"}]]}))
    frames = [{"filename": "/x/torch/optim/adam.py", "name": "step", "line": 1}]
    event = {"action": "alloc", "addr": 2**32, "size": 2**20, "frames": frames}
    died = tmp_path / "died.pickle"
    died.write_bytes(pickle.dumps({"device_traces": [[event, {**event, "action": "oom"}]]}))
    for command in (
        f"record {snapshot}",
        f"diagnose {died}",
        "devices 4090",
        "compare --model conv_pair --batch 2",
        f"replay {process}",
        f"sweep {sweep} --jobs 1",
        f"check --config {project}",
        "tables",
        "cache",
        "serve --model llama_8b --gpu L4 --max-model-len 100",
        "max-size --model gpt2 --input 16..20:int64 --batch 2 --gpu L4",
    ):
        assert run([*command.split(), "--json"]) == 0
        check(command.split()[0], json.loads(capsys.readouterr().out))


def test_every_command_has_its_json() -> None:
    """No command is missing from the documentation of the JSON."""
    text = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    assert [one for one in COMMANDS if f"`planner {one}`" not in text] == []


def test_a_calibration_is_documented() -> None:
    """A calibration that answers has the documented keys."""
    result = planner.estimate(
        "torchvision:convnext_tiny", 200, gpu="RTX 3060", input="3x86x86", target="scalar:int64",
        optimizer="adamw", zero_grad="before-backward", steps=4, cudnn="published",
    )  # fmt: skip
    fields = result.to_dict()
    assert fields["calibration"] is not None
    check("estimate", fields)


# ---- the rest


def test_the_catalogue_is_documented() -> None:
    """Every entry of models.yaml stands in the table, with its batch size."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|", (ROOT / "docs/catalogue.md").read_text(), re.MULTILINE)
    assert {key: int(batch) for key, batch in rows} == {
        key: entry.batch for key, entry in load_catalogue().items()
    }


def commands(path: Path) -> list[str]:
    """Every line that begins with `planner` in a block of code, continued lines joined, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("planner ")]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_are_understood(path: Path) -> None:
    """Every command that the documentation shows is one that the command line takes without a complaint."""
    refused = []
    for line in commands(path):
        words = shlex.split(re.split(r"  +#|  +[A-Za-z]|\s[|>]", line)[0])[1:]
        if words[0].startswith("--"):
            continue
        try:
            parse(words)
        except UsageError:
            refused.append(line)
    assert refused == []


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link names a file of the repository, and every anchor a heading in it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file) if file else path
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)
    assert broken == []


SOURCES = sorted(path for room in ("planner", "calibration") for path in (ROOT / room).rglob("*.py"))


def test_files_that_sources_and_messages_name_are_there() -> None:
    """No comment, docstring or message names a file that was moved."""
    named = re.compile(
        r"\b(?:benchmarks|calibration|docs|planner|tests|tools)/[\w/]+\.(?:c|h|csv|json|md|py|yaml)\b"
    )
    missing = {
        f"{name(path)}: {file}"
        for path in SOURCES
        for file in named.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / file).is_file()
    }
    assert missing == set()


def anchors(path: Path) -> set[str]:
    """The headings as GitHub names them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_picture_of_a_terminal_has_the_figures_of_the_readme() -> None:
    """The README's answer is run by a test; the picture below it is drawn of the same command."""
    answer = re.compile(r"Largest batch:\s+([\d,]+) at confidence")
    readme = answer.search((ROOT / "README.md").read_text(encoding="utf-8"))
    drawn = unescape((ROOT / "docs/terminal.svg").read_text(encoding="utf-8")).replace("\xa0", " ")
    picture = answer.search(drawn)
    assert readme is not None and picture is not None and readme[1] == picture[1]
