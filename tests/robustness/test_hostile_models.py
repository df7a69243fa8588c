"""Whatever models, files, other processes and the machine do: one clear line, and nothing broken or left.

`--runs N` sets how often the counted tests run (`make soak`: 1,000 in all); each prints what it counted.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from calibration.observations import save_observation
from planner import max_batch
from planner.allocator.history.snapshot_reader import load_snapshot
from planner.capture.models.registry import construct_model, find_constructor
from planner.capture.process_state import preserve_process_state
from planner.capture.session import record
from planner.cli import run
from planner.errors import DataFileError, ModelError, PlannerError, UsageError
from planner.hardware.calibration.files import Origins, add_points, key_of, load_folders
from planner.hardware.calibration.fit import fit_points
from planner.hardware.calibration.model import NoFit, Point
from planner.jobs import Job, parse_tensor_spec
from planner.planning.sweep.results import ResultStore
from planner.planning.sweep.task import Task, TaskResult
from planner.program.events import Phase, PhaseStart, Site, Trace
from planner.program.program import constant_program
from planner.store.cache_dir import CacheDirectory
from tests.helpers.file_readers import FIGURES
from tests.helpers.runs import RUN
from tests.helpers.structs import replace
from tests.helpers.traces import GA102, load_trace, save_trace
from tests.store.test_codec import ABOUT, PROGRAM

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
    *("Dtype", "Device", "Settings", "Process", "NoGrad", "Inference", "Autocast", "CpuAutocast"),
    *("Dispatch", "Fake", "Function"),
)
RAISING = ("RudeForward", "MuteForward", "ExitForward", "RudeBuild", "MuteBuild", "ExitBuild")
APART = """
import os, subprocess, sys, time
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
        os._exit(3)

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
        os._exit(0)
"""


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> int:
    """How often a counted test runs."""
    return int(request.config.getoption("--runs"))


def job_of(file: Path, name: str) -> Job:
    spec = parse_tensor_spec
    return Job(f"{file}:{name}", inputs=(spec("4"),), target=spec("scalar:int64"))


def state() -> dict[str, Any]:
    """What models could have changed."""
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
    """A default dtype that FILE.py sets when it is imported holds for its model, and for nobody else."""
    file = tmp_path / "double.py"
    file.write_text(
        "import torch\nfrom torch import nn\ntorch.set_default_dtype(torch.float64)\n"
        "def build():\n    return nn.Linear(1024, 1024)\n"
    )
    job = replace(job_of(file, "build"), inputs=(parse_tensor_spec("1024:float64"),))
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
    """A FILE.py that fails is told in one line."""
    file = tmp_path / "failing.py"
    file.write_text(line)
    with pytest.raises(ModelError, match=r"failing\.py:\d: importing the file fails"):
        find_constructor(job_of(file, "x"))


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
    for said in (apart, here):
        del said["seconds"]
    assert apart["max_batch"] == here["max_batch"] > 0
    assert apart["probes"] == here["probes"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Exits", "no trace of batch 2: its process ended with code 3; mend what ends it"),
        ("Lies", "no trace of batch 2: its process ended with code 0; mend what ends it"),
        ("Hangs", "no trace of batch 2 in 15 s; mend what hangs, or allow more with --time-limit"),
    ],
)
def test_an_isolated_model_may_exit_lie_and_hang(tmp_path: Path, name: str, said: str) -> None:
    """A process that ends or takes too long is an error in one line; its children end with it."""
    file = tmp_path / "apart.py"
    file.write_text(APART)
    with pytest.raises(ModelError) as caught:
        max_batch(
            f"{file}:{name}", input="4", target="scalar:int64", gpu_mib=2000, isolate=True, time_limit=15
        )
    assert str(caught.value) in (f"{file}:{name}: {said}", "1")
    assert "sleep 1000" not in _commands_of_group(tmp_path)


def _commands_of_group(folder: Path) -> str:
    """The command lines of all processes that were started here and live."""
    found = []
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink() in (folder, Path.cwd()):
                    found.append(
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
            except OSError:
                continue
    return "\n".join(found)


def test_isolation_that_cannot_be_is_refused() -> None:
    """A limit without a process of its own, a limit of nothing, and an object that no other process sees."""
    for options, said in (
        ({"time_limit": 5.0}, "--time-limit: only a model in a process of its own is stopped"),
        ({"isolate": True, "time_limit": 0.0}, "--time-limit 0.0: give the seconds"),
    ):
        with pytest.raises(UsageError, match=said):
            max_batch("cnn", gpu_mib=2000, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--isolate: another process cannot see this object"):
        max_batch(lambda: None, input="4", target="scalar:int64", gpu_mib=2000, isolate=True)


# ---- data files execute nothing


CATALOGUE = "evil:\n  source: {file}:build\n  about: Innocent.\n  inputs: ['4']\n  target: scalar:int64\n"
CAMPAIGN = "about: a\ngroups:\n  - {{about: b, models: ['{file}:build'], batches: [1, 2], input: ['4']}}\n"
PROCESS = "models: {{net: '{file}:build'}}\nsteps: [empty_cache]\n"
SWEEP = "about: a\nmodels: [{{model: '{file}:build', input: ['4']}}]\nrecipes: {{sgd: {{}}}}\ngpus: [L4]\n"
COMMANDS: dict[str, tuple[str, Callable[[str], list[str]]]] = {
    "catalogue": (CATALOGUE, lambda path: ["max-batch", "--models", path, "--model", "evil", "--gpu", "L4"]),
    "campaign": (CAMPAIGN, lambda path: ["calibrate", "--campaign", path]),
    "process": (PROCESS, lambda path: ["replay", path]),
    "sweep": (SWEEP, lambda path: ["sweep", path]),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_data_file_names_no_code(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A FILE.py:NAME in a catalogue, campaign, process or sweep file is refused with exit code 4 and its
    line, and the file is not run.
    """
    text, command = COMMANDS[kind]
    code, path = tmp_path / "evil.py", tmp_path / "data.yaml"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path.write_text(text.format(file=code))
    assert run(command(str(path))) == 4
    said = capsys.readouterr().err
    assert "would run code; --allow-code lets files name code that you trust" in said
    assert said.startswith(f"planner: {path} line ") and len(said.splitlines()) == 1
    assert not (tmp_path / "ran").exists()


def test_allow_code_lets_a_catalogue_name_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --allow-code the same catalogue is read and its code runs."""
    code, path = tmp_path / "mine.py", tmp_path / "data.yaml"
    code.write_text("from torch import nn\ndef build():\n    return nn.Linear(4, 4)\n")
    path.write_text(CATALOGUE.format(file=code))
    command = ["max-batch", "--models", str(path), "--model", "evil", "--gpu-mib", "2000", "--json"]
    assert run([*command, "--allow-code"]) == 0
    assert json.loads(capsys.readouterr().out)["max_batch"] > 0


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize(
    "tag",
    ["!!python/object/apply:os.system ['touch ran']", "!!python/name:os.system", "!!python/module:os ''"],
)
def test_yaml_tags_execute_nothing(
    tmp_path: Path, kind: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags that PyYAML's unsafe loaders would run are refused by every reader, wherever they stand."""
    text, command = COMMANDS[kind]
    path = tmp_path / "data.yaml"
    monkeypatch.chdir(tmp_path)
    for key in ("Innocent.", "{file}:build", "scalar:int64", "about: a", "[1, 2]", "empty_cache", "[L4]"):
        if key in text:
            path.write_text(text.replace(key, key.partition(": ")[0] + ": " + tag if ": " in key else tag))
            assert run(command(str(path))) in (2, 4)
    assert not (tmp_path / "ran").exists()


def test_a_snapshot_executes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that would call something when it is loaded is refused before it does."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(DataFileError, match=r"it names os\.system, which no snapshot does"):
        load_snapshot(path)
    assert not (tmp_path / "ran").exists()


# ---- the disk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_an_answer_that_finds_no_room_is_told_in_one_line() -> None:
    """Standard output on a full disk: exit code 4, as for a file that cannot be written, and no traceback."""
    command = [sys.executable, "-m", "planner", "devices", "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (4, "planner: standard output: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("words", "code"), [("devices l4", 0), ("devices zzz", 1), ("devices --what", 2)])
def test_the_exit_code_tells_where_nobody_listens(words: str, code: int, streams: str) -> None:
    """Without standard error, or where errors find no room."""
    line = f'"{sys.executable}" -m planner {words} {streams}'
    assert subprocess.run(line, shell=True, capture_output=True).returncode == code


CLOSED = (
    "planner: standard output: is closed, so that the answer cannot be written; "
    "send it to /dev/null where none is wanted\n"
)


@pytest.mark.parametrize("streams", [">&-", "<&- >&-", ">&- 2>&-"])
@pytest.mark.parametrize(
    "words",
    [
        "devices l4",
        "devices zzz",
        "cache --json",
        "max-batch --model conv_pair --gpu L4",
        "gpus --model conv_pair --filter L4 --csv",
        "estimate --help",
        "--version",
        "",
    ],
)
def test_an_answer_that_nobody_can_get_is_no_success(words: str, streams: str) -> None:
    """A closed standard output is told as a full disk is: exit code 4 and one line, whatever the answer."""
    line = f'"{sys.executable}" -m planner {words} {streams}'
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (4, "" if "2>" in streams else CLOSED)


@pytest.mark.parametrize(("words", "code"), [("devices --what", 2), ("sweep /nowhere.yaml", 4)])
def test_an_error_before_the_answer_keeps_its_code(words: str, code: int) -> None:
    """Where nothing was to be written, a closed standard output does not matter."""
    line = f'"{sys.executable}" -m planner {words} >&-'
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1)


def test_a_full_disk_gives_one_line_and_leaves_the_old_file(tmp_path: Path) -> None:
    """Where a file may not grow, every writer says so in one line, and what was there before is whole."""
    key, points = key_of(RUN), [Point(RUN, 1000)]
    task = Task("m", "r", RUN.job, (), {})
    writers: dict[str, Callable[[Path, int], object]] = {
        "trace": lambda folder, n: save_trace(
            PROGRAM, folder / "t.trace", {**ABOUT, "n": n, "pad": _noise()}
        ),
        "observation": lambda folder, n: save_observation(
            replace(RUN, about=_noise() * n), folder / "observation.json"
        ),
        "calibration": lambda folder, n: add_points(
            folder, key, [Point(replace(p.observation, batch=n), n) for p in points], ORIGINS, fit_points
        ),
        "sweep": lambda folder, n: ResultStore(folder, "", print).keep(
            task, TaskResult({"x": FIGURES}, (_noise() * n,))
        ),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in writers.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder, 1)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            with pytest.raises(DataFileError) as caught:
                write(folder, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "File too large" in str(caught.value) and len(str(caught.value).splitlines()) == 1
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def _noise() -> str:
    """What compression does not make small."""
    return "".join(random.Random(3).choices("0123456789abcdef", k=1000))


@pytest.mark.parametrize("home", ["/dev/null/home", "/proc/home"])
def test_a_home_that_cannot_be_written_gives_one_line(
    tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a home to keep things in, a plan still answers, and a sweep says what it cannot make."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, home)
    assert run(["max-batch", "--model", "conv_pair", "--gpu", "L4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_batch"] > 0
    grid = tmp_path / "g.yaml"
    grid.write_text("about: a\nmodels: [conv_pair]\nrecipes: {sgd: {}}\ngpus: [L4]\n")
    assert run(["sweep", str(grid), "--results", f"{home}/r"]) == 4
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and f"{home}/r: cannot be made" in said[0] and "--results" in said[0]


# ---- interrupts and other processes: nothing lost, nothing half-written


ORIGINS = Origins("measured", "a", "torch 2.13")


def _write_all(folder: Path, numbers: range, tell: int) -> None:
    """Write each number into a calibration, a trace, a cache and a folder of results; then tell it."""
    small = Trace((PhaseStart(0, Phase.SETUP),), (Site("", "to"),), 2)
    store, task = ResultStore(folder / "sweep", "", print), Task("m", "r", RUN.job, (), {})
    cache = CacheDirectory(folder / "cache", print)
    for number in numbers:
        measured = replace(RUN, batch=number)
        add_points(folder, key_of(measured), [Point(measured, 10**9 + number)], ORIGINS, _no_fit)
        save_trace(small, folder / "t.trace", {"number": number})
        cache.put({"number": number % 3}, [constant_program(small, GA102)], {})
        store.keep(task, TaskResult({str(number): FIGURES}))
        os.write(tell, f"{number}\n".encode())


def _no_fit(points: object) -> NoFit:
    return NoFit("not asked for")


class Telling:
    """What a process tells, a number in each line."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._heard = pipe, b""

    def wait(self, count: int) -> None:
        """Until it has told so many numbers, or has ended."""
        while self._heard.count(b"\n") < count and (more := os.read(self._pipe, 4096)):
            self._heard += more

    def all(self) -> set[int]:
        """All of them, when it has ended."""
        with os.fdopen(self._pipe, "rb") as file:
            return set(map(int, (self._heard + file.read()).split()))


@contextmanager
def forked(folder: Path, numbers: range) -> Iterator[tuple[int, Telling]]:
    """A process that writes; its id, and what it tells."""
    out, tell = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            _write_all(folder, numbers, tell)
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(130)
        finally:  # never back into the tests
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.close(tell)
    yield pid, Telling(out)
    os.waitpid(pid, 0)


def _kept(folder: Path) -> tuple[set[int], int]:
    """Numbers that are in the calibrations and in the results; and how many files could not be read."""
    measured: set[int] = set()
    swept: set[int] = set()
    broken = 0
    try:
        measured = {point.observation.batch for one in load_folders([folder]) for point in one.points}
    except PlannerError:
        broken += 1
    try:
        if (folder / "t.trace").exists():
            load_trace(folder / "t.trace")
    except PlannerError:
        broken += 1
    warned: list[str] = []
    cache = CacheDirectory(folder / "cache", warned.append)
    for number in range(3):
        cache.get({"number": number})
    broken += len(warned)
    for path in (folder / "sweep").glob("*.json"):
        try:
            swept |= set(map(int, json.loads(path.read_text())["cells"]))
        except ValueError:
            broken += 1
    return measured & swept, broken


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path, runs: int) -> None:
    """Several processes write into the same folders at once: all of it is there, and whole."""
    each = max(2, runs // 4)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(forked(tmp_path, range(1 + each * number, 1 + each * (number + 1))))
            for number in range(4)
        ]
        written = set().union(*(telling.all() for _, telling in writers))
    kept, broken = _kept(tmp_path)
    print(f"\nconcurrent: {len(written)} writes by 4 processes, {len(written - kept)} lost, {broken} broken")
    assert written == kept == set(range(1, 4 * each + 1)) and broken == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_processes_leave_nothing_half_written(
    tmp_path: Path, runs: int, number: signal.Signals
) -> None:
    """Processes are stopped while they write: what they told is there, and everything is whole."""
    chance = random.Random(number)
    total = lost = broken = partial = 0
    for turn in range(runs):
        folder = tmp_path / str(turn // 10)
        with forked(folder, range(1 + 10 * (turn % 10), 11 + 10 * (turn % 10))) as (pid, telling):
            telling.wait(chance.randrange(10))
            time.sleep(chance.random() * 0.02)  # anywhere within the next of its writes
            os.kill(pid, number)
            written = telling.all()
        kept, unreadable = _kept(folder)
        total, lost, broken = total + len(written), lost + len(written - kept), broken + unreadable
        partial += len([*folder.rglob("*.partial")])
    print(f"\n{number.name}: {runs} processes, {total} writes, {lost} lost, {broken} broken")
    assert (lost, broken) == (0, 0) and total > 0
    assert number == signal.SIGKILL or partial == 0
