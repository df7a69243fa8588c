"""Hostile models and their files: one clear line, and nothing broken or left."""

import json
import os
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from planner import max_batch
from planner.capture.models.registry import construct_model, find_constructor
from planner.capture.process_state import preserve_process_state
from planner.capture.session import record
from planner.cli import run
from planner.errors import ModelError, UsageError
from planner.jobs import Job, parse_tensor_spec

AMPERE = (8, 6)

HOSTILE = """
import os, random, sys, warnings
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch._subclasses.fake_tensor import FakeTensorMode

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.build()

    def build(self):
        pass

    def act(self):
        pass

    def forward(self, x):
        out = self.head(x)
        self.act()
        return out

def doing(**does):
    return type("Doing", (Model,), {name: staticmethod(code) for name, code in does.items()})

def settings():
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.set_num_threads(7)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(5)
    random.seed(5)
    sys.setrecursionlimit(4321)

def precisions():
    torch.backends.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # torch then refuses to tell allow_tf32

def process():
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "nothing")
    sys.path.insert(0, "/nowhere")
    os.environ["HOSTILE"] = "1"
    os.environ.pop("PATH", None)
    os.chdir("/")
    sys.stdout = None

class Rude(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise ValueError("no text for you")

def throw(error):
    def code(*args):
        raise error
    return code

Dtype = doing(act=lambda: torch.set_default_dtype(torch.float64))
Device = doing(act=lambda: torch.set_default_device("meta"))
Settings = doing(build=settings, act=settings)
Precisions = doing(build=precisions, act=precisions)
Process = doing(build=process, act=process)
NoGrad = doing(act=lambda: torch.set_grad_enabled(False))
Inference = doing(act=lambda: torch.inference_mode().__enter__())
Autocast = doing(act=lambda: torch.autocast("cuda", dtype=torch.float16).__enter__())
CpuAutocast = doing(act=lambda: torch.autocast("cpu").__enter__())
Dispatch = doing(act=lambda: Mode().__enter__())
Fake = doing(act=lambda: FakeTensorMode().__enter__())
Function = doing(act=lambda: torch.device("meta").__enter__())
RudeForward = doing(act=throw(Rude("rude")))
MuteForward = doing(act=throw(Mute()))
ExitForward = doing(act=throw(SystemExit(3)))
RudeBuild = doing(build=throw(Rude("rude")))
MuteBuild = doing(build=throw(Mute()))
ExitBuild = doing(build=throw(SystemExit(3)))
"""
CHANGING = (
    *(
        "Dtype",
        "Device",
        "Settings",
        "Precisions",
        "Process",
        "NoGrad",
        "Inference",
        "Autocast",
        "CpuAutocast",
    ),
    *("Dispatch", "Fake", "Function"),
)
RAISING = ("RudeForward", "MuteForward", "ExitForward", "RudeBuild", "MuteBuild", "ExitBuild")
APART = """
import ctypes, os, subprocess, sys, time
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(x)

class Prints(Model):
    def forward(self, x):
        os.write(1, b"raw chatter")
        subprocess.run(["echo", "more chatter"])
        return self.head(x)

class Exits(Model):
    def forward(self, x):
        ctypes.CDLL(None)._exit(3)  # os._exit does not end a plan

class Hangs(Model):
    def forward(self, x):
        subprocess.Popen(["sleep", "1000"])
        while True:
            time.sleep(1)

class Lies(Model):
    def forward(self, x):
        for number in range(3, 20):
            try:
                os.write(number, b'{"error": "SystemExit", "message": 1}\\n')
            except OSError:
                pass
        ctypes.CDLL(None)._exit(0)
"""


def job_of(file: Path, name: str) -> Job:
    spec = parse_tensor_spec
    return Job.create(f"{file}:{name}", inputs=(spec("4"),), target=spec("scalar:int64"))


def state() -> dict[str, Any]:
    """Return what models could have changed."""
    with preserve_process_state():
        pass
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu")],
        "dispatch": torch._C._len_torch_dispatch_stack(),
        "function": torch._C._len_torch_function_stack(),
        "threads": torch.get_num_threads(),
        "cudnn": [
            getattr(torch.backends.cudnn, name) for name in ("benchmark", "allow_tf32", "deterministic")
        ],
        "matmul": torch.get_float32_matmul_precision(),
        "precisions": (torch.backends.fp32_precision, torch.backends.cudnn.conv.fp32_precision),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "rng": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "recursion": sys.getrecursionlimit(),
        "path": list(sys.path),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "stdout": sys.stdout,
    }


# ---- models


@pytest.mark.parametrize("name", CHANGING)
def test_a_model_that_changes_the_process_leaves_it_clean(tmp_path: Path, name: str) -> None:
    """Settings and modes that a constructor or a forward pass leaves behind are put back after its trace."""
    file = tmp_path / "hostile.py"
    file.write_text(HOSTILE)
    job = job_of(file, name)
    before = state()
    constructor = find_constructor(job)
    with suppress(ModelError):  # some of it makes the model itself fail, as it would on a GPU
        record(job, 2, AMPERE, lambda job: construct_model(job, constructor))
    assert state() == before
    leaf = torch.ones(2, requires_grad=True)
    (leaf * 2).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0, 2.0]


def test_a_file_may_set_what_its_models_count_on(tmp_path: Path) -> None:
    """A default dtype that FILE.py sets when it is imported holds for its model alone."""
    file = tmp_path / "double.py"
    file.write_text(
        "import torch\nfrom torch import nn\ntorch.set_default_dtype(torch.float64)\n"
        "def build():\n    return nn.Linear(1024, 1024)\n"
    )
    job = job_of(file, "build").replace(inputs=(parse_tensor_spec("1024:float64"),))
    constructor = find_constructor(job)
    assert torch.get_default_dtype() is torch.float32
    taken = record(job, 2, AMPERE, lambda job: construct_model(job, constructor))
    sizes = [event.size_bytes for event in taken.events if hasattr(event, "size_bytes")]
    assert sizes[0] == 8 * 1024 * 1024
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("name", RAISING)
def test_a_model_may_raise_anything(tmp_path: Path, name: str) -> None:
    """Exceptions of any class, without a text or to end the process, become one line that names the model."""
    file = tmp_path / "hostile.py"
    file.write_text(HOSTILE)
    job = job_of(file, name)
    constructor = find_constructor(job)
    with pytest.raises(ModelError) as caught:
        record(job, 2, AMPERE, lambda job: construct_model(job, constructor))
    assert len(str(caught.value).splitlines()) == 1 and name in str(caught.value)


@pytest.mark.parametrize(
    "line", ["raise SystemExit(3)", "class E(BaseException): pass\nraise E", "import os; x"]
)
def test_a_file_may_raise_anything_when_it_is_imported(tmp_path: Path, line: str) -> None:
    """A FILE.py that fails is reported in one line."""
    file = tmp_path / "failing.py"
    file.write_text(line)
    with pytest.raises(ModelError, match=r"failing\.py:\d: importing the file fails"):
        find_constructor(job_of(file, "x"))


def test_a_folder_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in a folder whose name is no UTF-8 is planned; a link that leads to itself is no file."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("net.py").write_text(APART)
    assert max_batch("net.py:Model", input="4", target="scalar:int64", gpu_mib=2000).max_batch > 0
    Path("loop.py").symlink_to("loop.py")
    with pytest.raises(UsageError, match=r"there is no file 'loop\.py'"):
        max_batch("loop.py:Model", input="4", target="scalar:int64", gpu_mib=2000)


@pytest.mark.slow
def test_an_isolated_model_gives_the_same_answer_and_may_print(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--isolate` changes no figure; what the model writes to any standard output is not in the JSON."""
    file = tmp_path / "apart.py"
    file.write_text(APART)
    words = ["--input", "4", "--target", "scalar:int64", "--gpu-mib", "2000", "--json"]
    assert run(["max-batch", "--model", f"{file}:Prints", "--isolate", *words]) == 0
    apart = json.loads(capfd.readouterr().out)
    here = max_batch(f"{file}:Model", input="4", target="scalar:int64", gpu_mib=2000).to_dict()
    for message in (apart, here):
        del message["seconds"]
    assert apart["max_batch"] == here["max_batch"] > 0
    assert apart["probes"] == here["probes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Exits", "no trace of batch 2: its process ended with code 3; mend what ends it"),
        ("Lies", "no trace of batch 2: its process ended with code 0; mend what ends it"),
        ("Hangs", "no trace of batch 2 in 15 s; mend what hangs, or allow more with --time-limit"),
    ],
)
def test_an_isolated_model_may_exit_lie_and_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    """A process that ends or takes too long is an error in one line; its children end with it."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "apart.py"
    file.write_text(APART)
    with pytest.raises(ModelError) as caught:
        max_batch(
            f"{file}:{name}", input="4", target="scalar:int64", gpu_mib=2000, isolate=True, time_limit=15
        )
    assert str(caught.value) in (f"{file}:{name}: {message}", "1")
    assert "sleep 1000" not in _commands_of_group(tmp_path)


def _commands_of_group(folder: Path) -> str:
    """The command lines of all processes that were started here and live."""
    commands = []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink() == folder:
                    commands.append(
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
            except OSError:
                continue
    return "\n".join(commands)


def test_isolation_that_cannot_be_is_refused() -> None:
    """A limit without a process of its own, a limit of nothing, and an object that no other process sees."""
    for options, message in (
        ({"time_limit": 5.0}, "--time-limit: only a model in a process of its own is stopped"),
        ({"isolate": True, "time_limit": 0.0}, "--time-limit 0.0: give the seconds"),
    ):
        with pytest.raises(UsageError, match=message):
            max_batch("cnn", gpu_mib=2000, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--isolate: another process cannot see this object"):
        max_batch(lambda: None, input="4", target="scalar:int64", gpu_mib=2000, isolate=True)
