"""Files that options name: each is written whole or not at all, whatever the disk has room for."""

import ast
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from planner.cli import run
from planner.cli.parser import COMMANDS, build_command
from tests.helpers.file_readers import READERS

ROOT = Path(__file__).parents[2]
OLD = b"what stood here before"
ROOM_BYTES = 64  # that a file may have: less than any of them takes
MODEL = ["--model", "conv_pair", "--no-cache"]
JOB = [*MODEL, "--batch", "2"]
# How each option that writes a file is called; {} is the file.
WRITERS = {
    ("explain", "--plot"): ["explain", *JOB, "--plot", "{}.png"],
    ("explain", "--html"): ["explain", *JOB, "--html", "{}.html"],
    ("explain", "--snapshot"): ["explain", *JOB, "--snapshot", "{}.pickle"],
    ("gpus", "--plot"): ["gpus", *MODEL, "--filter", "L4", "--plot", "{}.svg"],
    ("compare", "--plot"): ["compare", *JOB, "--plot", "{}.pdf"],
    ("sweep", "--csv"): ["sweep", "GRID", "--jobs", "1", "--csv", "{}.csv"],
    ("sweep", "--parquet"): ["sweep", "GRID", "--jobs", "1", "--parquet", "{}.parquet"],
    ("check", "--sarif"): ["check", "--config", "PROJECT", "--sarif", "{}.sarif"],
    ("check", "--summary"): ["check", "--config", "PROJECT", "--summary", "{}.md"],
    ("max-batch", "--save-trace"): ["max-batch", *MODEL, "--gpu", "L4", "--save-trace", "{}.trace"],
    ("estimate", "--save-trace"): ["estimate", *JOB, "--save-trace", "{}.trace"],
    ("record", "--out"): ["record", "SNAPSHOT", "--out", "{}.json.gz"],
    ("explain", "--save-trace"): ["explain", *JOB, "--save-trace", "{}.trace"],
}
READ = {
    "--models",
    "--trace",
    "--campaign",
    "--sizes",
    "--cluster",
    "--config",
}  # options that name a file to be read
# tests/emulator: needs the CUDA build of torch
ELSEWHERE = {("run", "--snapshot"), ("run", "--plot"), ("run", "--html")}
REFUSED = {  # the option stands among those of the job, and the command states that it means nothing there
    (command, "--save-trace")
    for command in ("gpus", "advise", "compare", "calibrate", "verify", "max-size", "diagnose")
}


def test_every_option_that_names_a_file_is_known_here() -> None:
    """Each `FILE` of the command line's own declarations is one that is read, written, or refused."""
    named = {
        (command, spelled)
        for command in COMMANDS
        for parameter in build_command(command).params
        if parameter.metavar == "FILE" and parameter.param_type_name == "option"
        for spelled in parameter.opts
    }
    assert {one for one in named if one[1] not in READ} == WRITERS.keys() | REFUSED | ELSEWHERE


@pytest.mark.slow
@pytest.mark.parametrize(("command", "option"), WRITERS, ids=str)
def test_a_full_disk_leaves_the_file_that_stood_there(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 4, the answer, one line that names the file, what it held before, and nothing beside it."""
    folder, grid = tmp_path / "out", tmp_path / "grid.yaml"
    folder.mkdir()
    grid.write_text("about: one\nmodels: [conv_pair]\nrecipes: {sgd: {}}\ngpus: [L4]\n")
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.planner]\ngpus = ["L4"]\njobs = {one = {model = "conv_pair", batch = 2}}\n')
    if command == "sweep":
        assert run(["sweep", str(grid), "--jobs", "1"]) == 0  # its stored results are there already
    words = [word.format(folder / "kept") for word in WRITERS[command, option]]
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(READERS["snapshot"].valid)
    places = {"GRID": str(grid), "PROJECT": str(project), "SNAPSHOT": str(snapshot)}
    words = [places.get(word, word) for word in words]
    file = Path(words[-1])
    file.write_bytes(OLD)
    if command == "check":
        assert run(["check", "--config", str(project)]) == 0  # so that its trace is cached
    capsys.readouterr()
    with little_room():
        code = run(words)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {file.name: OLD}
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert (code, len(lines)) == (4, 1)
    assert printed.out  # the answer is there all the same
    assert lines[0].startswith(f"planner: {file}: ") and "File too large" in lines[0]


@contextmanager
def little_room() -> Iterator[None]:
    """Limit each file of this process to a few bytes, as on a disk that is nearly full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


# Modules that open something for writing that is no file of the user's, and what it is.
NO_FILES = {
    "planner/_support/atomic_write.py": "the one writer",
    "planner/_support/worker.py": "the pipe to the parent",
    "planner/api/watch.py": "an empty file, whose name no other process takes; torch writes the snapshot",
    "planner/capture/cuda/checkpoints/safetensors.py": "a planned checkpoint, which goes with the plan",
    "planner/capture/cuda/checkpoints/saved_files.py": "a copy of such a checkpoint",
    "planner/cli/__init__.py": "standard output and standard error",
    "planner/emulator/child/boot.py": "a reason for the planner, in a folder that goes with the run",
    "planner/emulator/child/libraries/build.py": "a library, in a folder that is renamed when it is whole",
    "planner/emulator/child/history.py": "a history, in a folder that goes with the run",
    "planner/emulator/child/libraries/private.py": "digests of a library, before it is renamed; a lock",
    "planner/emulator/child/recorder.py": "a record, replaced when whole, in a folder that goes with the run",
    "planner/report/plots/_axes.py": "a picture in memory",
}
WRITING = ("savefig", "write_text", "write_html", "write_image", "tofile")
OPENING = ("open", "fdopen")


def test_no_module_but_the_atomic_writer_opens_files_for_writing() -> None:
    """A writer that does not rename would leave half a file where a whole one stood."""
    openers = {
        str(path.relative_to(ROOT))
        for package in ("planner", "calibration")
        for path in sorted((ROOT / package).rglob("*.py"))
        if any(_writes(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert openers == NO_FILES.keys()


def _writes(node: ast.AST) -> bool:
    """Return whether a node calls something that writes a file by its name."""
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name == "write_bytes":
        return isinstance(function, ast.Attribute)  # of a path; the function is the atomic writer's
    if name == "dump":
        return len(node.args) > 1  # into a file
    if name in ("to_csv", "to_parquet"):
        return bool(node.args or node.keywords)  # without a path they give the text
    if name in OPENING:
        values = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
        modes = [value.value for value in values if isinstance(value, ast.Constant)]
        return any(isinstance(mode, str) and _is_mode(mode) for mode in modes)
    return name in WRITING


def _is_mode(text: str) -> bool:
    return set(text) <= set("rwaxbt+") and bool(set(text) & set("wax+"))
