"""Cached traces: the same answers as without, from nothing but files, whatever happens to these."""

import errno
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner import estimate, gpus, max_batch
from planner._support.versions import installed_version, public_version
from planner.cli import run
from planner.hardware.cudnn.answer_cache import AnswerCache
from planner.hardware.database import find_device
from planner.jobs import Job
from planner.program.events import Alloc, Category, Site, Trace
from planner.program.program import constant_program
from planner.store.cache_dir import CacheDirectory, open_cache
from planner.store.fingerprint import digest, file_digest, fingerprint_of
from tests.helpers.traces import GA102

needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")

MODEL = """
import torch
from torch import nn
from parts import Block

class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.norm = nn.BatchNorm2d(width)
        self.block = Block(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.block(self.norm(self.stem(x)).flatten(2).transpose(1, 2)).mean(1))

class Forking(nn.Module):
    def __init__(self):
        super().__init__()
        self.few, self.many = nn.Linear(4096, 4096), nn.Linear(4096, 4096)

    def forward(self, x):
        return self.few(x) if len(x) < 50 else self.many(self.few(x))
"""
PARTS = """
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.attend(x, x, x, need_weights=False)[0])
"""
NET: dict[str, Any] = {"input": "3x64x64", "target": "scalar:int64"}
FEW: dict[str, Any] = {"input": "3x64x64", "mode": "infer", "steps": 1}
FORKING: dict[str, Any] = {"input": "4096", "target": "scalar:int64", "optimizer": "adam"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of models that imports another beside it, in the working directory."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "model.py"


def json_of(result: Any) -> Any:
    """The JSON of an answer without the time that it took."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: timeless(item) for key, item in value.items() if key != "seconds"}
        return [timeless(item) for item in value] if isinstance(value, list) else value

    return timeless(result.to_dict())


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.trace"))


@pytest.mark.slow
def test_cached_answers_are_the_answers(model: Path) -> None:
    """Answers from an empty or a full cache are those without one, on GPUs with other figures as well."""
    folder = model.parent / "cache"
    amp = NET | {"optimizer": "adamw", "precision": "amp-fp16"}
    small, large = {"gpu_mib": 1500}, {"gpu": "RTX 3060"}
    for name, options, cards in (
        ("model.py:Net", amp, (small, large)),
        ("model.py:Net", {"input": "3x64x64", "mode": "infer", "model_arg": ["width=64"]}, (large, small)),
        ("model.py:Forking", FORKING, (small,)),
    ):
        for card in cards:
            plain = json_of(max_batch(name, **card, **options))
            assert json_of(max_batch(name, **card, **options, cache=folder)) == plain
        assert json_of(max_batch(name, **card, **options, cache=folder)) == plain
        assert json_of(estimate(name, 7, **options, cache=folder)) == json_of(estimate(name, 7, **options))


def test_all_cards_from_cached_traces(model: Path) -> None:
    """The table of GPUs is the same from cached traces, when they are made and when they are read."""
    folder = model.parent / "cache"
    few = [find_device(name) for name in ("T4", "RTX 3060", "A10")]
    plain = json_of(gpus("model.py:Net", devices=few, **FEW))
    assert json_of(gpus("model.py:Net", devices=few, **FEW, cache=folder)) == plain
    assert json_of(gpus("model.py:Net", devices=few, **FEW, cache=folder)) == plain


WITHOUT_TORCH = """
import sys
for name in ("torch", "torchvision", "transformers", "timm", "scipy", "numpy"):
    sys.modules[name] = None
from planner.cli import run
sys.exit(run(sys.argv[1:]))
"""


def without_torch(arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(home)}
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments.split()]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_planned_job_needs_no_torch(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planned again, for another GPU of the same kind, for less of one, or at a batch size: no import."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent / "home"))
    command = "max-batch --model model.py:Net --input 3x64x64 --target scalar:int64 --json"
    assert run([*command.split(), "--gpu-mib", "2000"]) == 0
    first = json.loads(capsys.readouterr().out)
    again = without_torch(f"{command} --gpu-mib 2000", model.parent / "home")
    assert again.stderr == ""
    assert json.loads(again.stdout)["max_batch"] == first["max_batch"]
    for card in ("--gpu RTX3060", "--gpu RTX3090", "--gpu-mib 1200"):
        other = without_torch(f"{command} {card}", model.parent / "home")
        assert (other.stderr, other.returncode) == ("", 0)
    batch = "estimate --model model.py:Net --input 3x64x64 --target scalar:int64 --batch 9"
    assert without_torch(batch, model.parent / "home").returncode == 0
    assert without_torch(f"{command} --gpu-mib 2000 --no-cache", model.parent / "home").returncode != 0


@needs_timm
def test_completed_jobs_are_cached(tmp_path: Path) -> None:
    """A job whose inputs its library declares is known the next time without the library."""
    options: dict[str, Any] = {"model_arg": ["num_classes=10"]}
    result = estimate("timm:resnet10t", 2, cache=tmp_path, **options)
    assert [spec.shape for spec in result.estimate.job.samples.inputs] == [(3, 176, 176)]
    code = (
        "import sys; sys.modules['timm'] = sys.modules['torch'] = None\n"
        "from planner import estimate\n"
        f"print(estimate('timm:resnet10t', 2, cache={str(tmp_path)!r}, model_arg=['num_classes=10']).fits)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("yes\n", "")


@needs_timm
def test_completed_jobs_keep_options_that_change_no_trace(tmp_path: Path) -> None:
    """Jobs that share a file are completed with their own cuDNN, not with that of the job that filled it."""
    own = {"cudnn": "published", "cudnn_benchmark": True, "lengths": "varying", "dataset_size": 9}
    for options in ({"cudnn": "stored"}, own, {"cudnn": "stored"}):
        job = estimate("timm:resnet10t", 2, cache=tmp_path, **options).estimate.job  # type: ignore[arg-type]
        shared = {name: job.value(name) for name in own}
        assert shared == {name: options.get(name, Job.create("").value(name)) for name in own}


@pytest.mark.slow
def test_settings_of_torch_have_entries_of_their_own(tmp_path: Path) -> None:
    """If the process changed what traces depend on, its traces are cached apart from those of others."""
    code = (
        "import torch; from planner import estimate\n"
        "{}\n"
        f"print(estimate('conv_pair', 2, cache={str(tmp_path)!r}).fits)"
    )
    for number, line in enumerate(("torch.use_deterministic_algorithms(True)", "pass"), 1):
        done = subprocess.run([sys.executable, "-c", code.format(line)], capture_output=True, text=True)
        assert (done.stdout, done.stderr) == ("yes\n", "")
        keys = [json.loads(gzip.decompress(path.read_bytes()))["about"]["key"] for path in entries(tmp_path)]
        settings = [key.get("settings") for key in keys]
        assert settings.count({"deterministic algorithms": "(True, False)"}) * number == len(keys)


# ---- what decides a trace


def test_keys_distinguish_jobs(model: Path) -> None:
    """Each field of a job, the file and the modules beside it make another key; the same again the same."""
    job = Job.create("model.py:Net")
    key = fingerprint_of(job)
    assert key is not None
    assert fingerprint_of(Job.create("model.py:Net")) == key
    others = [
        fingerprint_of(Job.create("model.py:Net", steps=2)),
        fingerprint_of(Job.create("model.py:Net", model_args=(("width", 64),))),
    ]
    (model.parent / "parts.py").write_text(PARTS + "\n")
    others.append(fingerprint_of(job))
    model.write_text(MODEL + "\n")
    others.append(fingerprint_of(job))
    names = {digest(other) for other in (key, *others) if other is not None}
    assert len(names) == 5


@pytest.mark.parametrize(
    "line",
    [
        "import os", "from pathlib import Path", "width = int(open('width').read())", "import random",
        "weights = torch.load('weights')", "import importlib", "exec('x = 1')", "from . import other",
        "import a_module_that_is_nowhere", "import torch.hub as hub", "from torch.hub import list as names",
        "from transformers import BertConfig\nwidth = BertConfig.from_json_file('c.json').hidden_size",
        "from torchvision.datasets import ImageFolder", "from torchvision.io import read_image",
        "import sys\nwidth = len(sys.path)", "import sys as system", "from sys import stdin",
    ],
)  # fmt: skip
def test_files_that_may_look_at_anything_are_not_cached(model: Path, line: str) -> None:
    """A model that reads files, names modules at run time, or imports unknown ones has no key."""
    assert file_digest(model) is not None
    model.write_text(f"{MODEL}\n{line}\n")
    assert file_digest(model) is None
    (model.parent / "parts.py").write_text(f"{PARTS}\n{line}\n")
    model.write_text(MODEL)
    assert file_digest(model) is None


SCRIPT = """
import argparse
import sys

net.eval()

def helper(): pass

def train_step(x):
    helper()

def main():
    torch.load("data")

if __name__ == "__main__":
    import os
    main()
    sys.exit(0)
"""


def test_code_that_a_plan_does_not_run_may_look_at_anything(model: Path) -> None:
    """Code below the guard of scripts, and functions that it alone calls, which load data."""
    model.write_text(MODEL + SCRIPT)
    assert file_digest(model, "train_step") is not None
    assert file_digest(model, "main") is None
    for changed in (("def helper(): pass", "def helper(): main()"), ("net.eval()", "net.load()")):
        model.write_text(MODEL + SCRIPT.replace(*changed))
        assert file_digest(model, "train_step") is None
    model.write_text(MODEL + SCRIPT.replace("def helper(): pass", "def helper(x=main()): pass"))
    assert file_digest(model, "train_step") is None


def test_a_folder_with_an_unreadable_file_is_not_kept(tmp_path: Path) -> None:
    """The cache of a hub has links, whose targets may be gone; the model's use of them is unknown."""
    (tmp_path / "config.json").write_text("{}")
    assert fingerprint_of(Job.create(f"hf:{tmp_path}")) is not None
    (tmp_path / "tokenizer.json").symlink_to("nowhere")
    assert fingerprint_of(Job.create(f"hf:{tmp_path}")) is None


def test_versions_without_metadata() -> None:
    """The version of an installed distribution as its folder names it, however its name is written."""
    assert installed_version("pytest") == pytest.__version__
    assert installed_version("PyYAML") == installed_version("pyyaml") == yaml.__version__
    assert installed_version("no-such-distribution") is None
    code = (
        "import sys; from planner._support.versions import installed_version\n"
        "print(installed_version('torch') is not None, 'importlib.metadata' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True False\n"
    assert (public_version("2.13.0+cpu"), public_version(None)) == ("2.13.0", None)


# ---- what happens to files


def cards_answer(folder: Path, warn: Callable[[str], None]) -> Any:
    return json_of(max_batch("model.py:Net", gpu_mib=2000, cache=folder, warn=warn, **NET))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x80\x04\x95pickle?"),
        lambda path: path.write_bytes(os.urandom(4096)),
    ],
    ids=["cut short", "empty", "no gzip", "noise"],
)
def test_broken_entries_are_rebuilt(model: Path, spoil: Callable[[Path], None]) -> None:
    """One line reports it, the answer is the same, and the next time there is nothing to report."""
    folder, lines = model.parent / "cache", list[str]()
    good = cards_answer(folder, lines.append)
    (entry,) = entries(folder)
    spoil(entry)
    assert cards_answer(folder, lines.append) == good
    assert len(lines) == 1
    assert "broken trace file" in lines[0]
    assert lines[0].endswith("capture it again")
    assert cards_answer(folder, lines.append) == good
    assert len(lines) == 1


def test_foreign_entries_are_rebuilt(model: Path) -> None:
    """A trace of another job under this job's name is not taken for its own."""
    folder, lines = model.parent / "cache", list[str]()
    good = cards_answer(folder, lines.append)
    (own,) = entries(folder)
    max_batch("model.py:Net", gpu_mib=2000, cache=folder, steps=2, **NET)
    (other,) = set(entries(folder)) - {own}
    own.write_bytes(other.read_bytes())
    assert cards_answer(folder, lines.append) == good
    assert [line.rpartition(": ")[2] for line in lines] == [
        "holds the trace of another job; capturing it again"
    ]


def test_a_folder_that_cannot_be_written_is_no_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without a place, or a full disk, is one line beside the answer."""
    lines: list[str] = []
    good = cards_answer(model.parent / "cache", lines.append)
    blocked = model / "below a file"
    assert cards_answer(blocked, lines.append) == good
    assert [line.startswith(f"{blocked}: no trace can be cached") for line in lines] == [True]

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    lines.clear()
    assert cards_answer(model.parent / "other", lines.append) == good
    assert len(lines) == 1
    assert "No space left on device; the plan goes on" in lines[0]


def one_trace(number: int) -> Trace:
    births = tuple(Alloc(block, 512 + number, Category.PARAMETER, 0) for block in range(200))
    return Trace(births, (Site("", "op"),), 1)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """Within the limit all stay; beyond it the one unused for longest goes."""
    cache = CacheDirectory(tmp_path, pytest.fail)
    for number in range(3):
        cache.put({"number": number}, [constant_program(one_trace(number), GA102)], {})
        os.utime(tmp_path / f"{digest({'number': number})}.trace", (number, number))
    size_bytes = cache.stats().size_bytes
    assert cache.get({"number": 0}) is not None  # used now
    spare_bytes = size_bytes // 6  # half an entry: packed entries differ by a few bytes
    smaller = CacheDirectory(tmp_path, pytest.fail, limit_bytes=size_bytes + spare_bytes)
    smaller.put({"number": 3}, [constant_program(one_trace(3), GA102)], {})
    assert [smaller.get({"number": number}) is not None for number in range(4)] == [True, False, True, True]


def test_clearing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`planner cache` counts, `planner cache clear` deletes entries and leftovers, and nothing else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "gpu-batch-planner" / "traces"
    assert run(["cache"]) == 0
    assert "0 cached traces, 0 KiB of at most 512 MiB" in " ".join(capsys.readouterr().out.split())
    open_cache(folder, pytest.fail).put({"number": 1}, [constant_program(one_trace(1), GA102)], {})
    (folder / "0f.trace.17.partial").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    answers = AnswerCache(folder)
    answers.put(b"query", b"answer")
    answers.flush()
    assert run(["cache", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["entries"], shown["answers"], shown["answers_limit_mib"]) == (1, 1, 128)
    assert run(["cache", "clear"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    size_kib = round(1024 * shown["answers_size_mib"])
    assert f"1 cached trace, 1 KiB deleted; 1 answer of cuDNN, {size_kib} KiB deleted" in words
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert run(["cache", "empty"]) == 2
    assert capsys.readouterr().err == (
        "planner: cache empty: only clear can be done; see planner cache --help\n"
    )


CROWD = """
import random, sys
from pathlib import Path
from planner.store.cache_dir import CacheDirectory
from planner.program.program import constant_program
from tests.helpers.traces import GA102
from tests.store.test_cache_dir import one_trace
seed, folder, limit = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
lines = []
cache, dice, found = CacheDirectory(folder, lines.append, limit), random.Random(seed), 0
for _ in range(60):
    number = dice.randrange(12)
    if dice.random() < 0.5:
        cache.put({"number": number}, [constant_program(one_trace(number), GA102)], {})
    else:
        known = cache.get({"number": number})
        assert known is None or known.programs[0].program.sites == one_trace(number).sites
        found += known is not None
    if dice.random() < 0.02:
        cache.clear()
assert lines == [], lines
print(found)
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Four that write, read, trim and clear at once: each finds whole traces or none, silently."""
    limit = 6 * 700
    crowd = [
        subprocess.Popen([sys.executable, "-c", CROWD, str(seed), str(tmp_path), str(limit)], stdout=-1)
        for seed in range(4)
    ]
    outputs = [process.communicate()[0] for process in crowd]
    assert [process.returncode for process in crowd] == [0] * 4
    assert sum(map(int, outputs)) > 20
    assert not list(tmp_path.glob("*.partial"))
