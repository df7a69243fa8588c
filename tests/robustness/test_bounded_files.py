"""Files without an end: every option that reads a file of data refuses devices, pipes and sparse files."""

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.allocator.history import snapshot_pickle
from planner.allocator.history.diff import compare_with_recording
from planner.allocator.history.history import History, HistoryEvent
from planner.allocator.history.lifetimes import recording_of
from planner.allocator.history.snapshot_reader import load_snapshot
from planner.cli import run
from planner.errors import DataFileError, UsageError
from planner.jobs import Job, load_distribution, parse_tensor_spec
from planner.planning.check.config import load_config
from planner.program.events import Alloc, Category, Phase, PhaseStart, Site, Trace

RESNET = ["--model", "torchvision:resnet18"]
TEXTS = ["--input", "input_ids=16..64:int64"]
OPTIONS: dict[str, tuple[str, list[str]]] = {  # name of the file, command with FILE or FOLDER
    "catalogue": ("models.yaml", ["max-batch", "--models", "FILE", "--model", "x", "--gpu", "L4"]),
    "campaign": ("campaign.yaml", ["calibrate", "--campaign", "FILE"]),
    "process": ("process.yaml", ["replay", "FILE"]),
    "sweep": ("sweep.yaml", ["sweep", "FILE"]),
    "check": ("pyproject.toml", ["check", "--config", "FILE"]),
    "trace": ("net.trace", ["max-batch", "--trace", "FILE", "--gpu", "L4"]),
    "history": ("net.history", ["explain", *RESNET, "--batch", "2", "--against", "FILE"]),
    "deepspeed": (
        "ds.json",
        ["max-batch", *RESNET, "--gpu", "L4", "--world-size", "2", "--deepspeed", "FILE"],
    ),
    "torchtitan": ("llama.toml", ["max-batch", "--model", "FILE", "--gpu", "L4"]),
    "log": ("train.log", ["diagnose", "FILE"]),
    "prices": ("prices.csv", ["gpus", *RESNET, "--prices", "FILE"]),
    "throughput": ("rates.csv", ["gpus", *RESNET, "--throughput", "FILE"]),
    "calibrations": ("a.yaml", ["max-batch", *RESNET, "--gpu", "L4", "--calibrations", "FOLDER"]),
    "sizes": ("sizes.txt", ["max-batch", "--model", "hf:bert", *TEXTS, "--gpu", "L4", "--sizes", "FILE"]),
    "array": ("sizes.npy", ["max-batch", "--model", "hf:bert", *TEXTS, "--gpu", "L4", "--sizes", "FILE"]),
    "config": ("config.json", ["max-batch", "--model", "hf:FOLDER", "--gpu", "L4"]),
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe by name")
@pytest.mark.parametrize("make", [_pipe, _device, _sparse])
@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_reads_what_has_no_end(
    tmp_path: Path, option: str, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe that nobody writes to, a device and a sparse terabyte are refused in one line that says why."""
    name, command = OPTIONS[option]
    path = tmp_path / name
    make(path)
    words = [word.replace("FILE", str(path)).replace("FOLDER", str(tmp_path)) for word in command]
    code = run(words)
    message = capsys.readouterr().err
    assert code in (2, 3, 4)
    assert len(message.splitlines()) == 1 and str(path) in message
    assert "larger than" in message if make is _sparse else "it is no regular file" in message


# ---- bombs: small files that would take much


def _write_pickle(path: Path, events: object) -> None:
    path.write_bytes(pickle.dumps({"device_traces": [events], "segments": []}))


def test_a_snapshot_with_nested_texts_takes_little(tmp_path: Path) -> None:
    """Lists of lists, each twice the one before, stand for 2**60 values, of which no text is made."""
    nested: object = "x"
    for _ in range(60):
        nested = [nested, nested]
    path = tmp_path / "snapshot.pickle"
    event = {"action": "alloc", "addr": 512, "size": 512, "stream": 0}
    for broken in ({"size": nested}, {"addr": nested}, {"stream": nested}):
        _write_pickle(path, [event | broken])
        with pytest.raises(DataFileError, match=r"is a list of 2, which is no size, address or stream"):
            load_snapshot(path)
    frame = {"filename": "net.py", "line": nested, "name": nested}
    _write_pickle(path, [event | {"frames": [frame]}])
    assert load_snapshot(path).sites == (Site("net.py:?", "?"),)


def test_a_snapshot_with_nested_keys_is_refused(tmp_path: Path) -> None:
    """Tuples of tuples as keys, whose hash would take 2**60 steps, are refused when they are met."""
    path = tmp_path / "snapshot.pickle"
    tuples = b"\x80\x04)" + b"\x94h\x00h\x00\x86" + b"".join(b"\x94h%ch%c\x86" % (n, n) for n in range(1, 60))
    for end in (
        b"}" + tuples[2:] + b"K\x01s.",
        b"(" + tuples[2:] + b"K\x01d.",
        b"}(" + tuples[2:] + b"K\x01u.",
    ):
        path.write_bytes(b"\x80\x04" + end)
        with pytest.raises(DataFileError, match="a key is neither a text nor a number"):
            load_snapshot(path)
    path.write_bytes(b"\x80\x04\x8f(" + tuples[2:] + b"\x90.")
    with pytest.raises(DataFileError, match="it has bytes or a set, which no snapshot has"):
        load_snapshot(path)


@pytest.mark.parametrize(
    "content",
    [
        *(b"N" * 2**17, b"(" * 2**17, b"]" * 2**17, b"]" + b"Na" * 2**17, b"]" + b"(Ne" * 2**17),
        *(b"N" + b"\x85" * 2**17, b"}" + b"K\x01Ns" * 2**17, b"N" + b"\x94" * 2**17, b"]" + b"}a" * 2**17),
    ],
)
def test_a_snapshot_of_more_objects_than_any_has_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An opcode of a byte makes an object of a hundred bytes, so objects are counted."""
    monkeypatch.setattr(snapshot_pickle, "_MOST_OBJECTS", 2**16)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"\x80\x04" + content + b".")
    with pytest.raises(DataFileError, match="it has more than 65,536 objects besides events"):
        load_snapshot(path)


def test_a_history_without_a_match_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """A history of 100,000 blocks that no trace has is compared in steps that grow with their number."""
    strange = (HistoryEvent("alloc", 2**20 * number, 2**20 + 512 * number) for number in range(1, 100_000))
    history = History("a", "2.13.0", "", None, None, tuple(strange))
    events = (PhaseStart(0, Phase.SETUP), *(Alloc(n, 512, Category.TEMPORARY, -1) for n in range(5)))
    found = compare_with_recording(Trace(events, (), 1), recording_of(history, "x"))
    assert (found.matched, len(found.extras)) == (0, 100_004)


def test_a_table_of_deep_keys_is_refused(tmp_path: Path) -> None:
    """Dotted keys of 1,000 parts and of 20,000, whose places would take gigabytes, are refused."""
    path = tmp_path / "pyproject.toml"
    for text in (
        "[tool.planner]\n" + ".".join("a" * 1_000) + " = 1\n",
        "[tool.planner]\n" + ".".join("a" * 20_000) + " = 1\n",
        "[tool.planner]\n[" + ".".join("a" * 20_000) + "]\n",
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match="nested too deeply, or in values of too many lines"):
            load_config(path, {}, ())


def test_a_trace_that_unpacks_to_much_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred kilobytes that unpack to a hundred megabytes are refused before they are decoded."""
    import gzip

    path = tmp_path / "net.trace"
    path.write_bytes(gzip.compress(b'{"format": [' + b"1," * 50_000_000 + b"1]}"))
    assert run(["max-batch", "--trace", str(path), "--gpu", "L4"]) == 4
    assert "broken trace file: it holds more than 67108864 bytes" in capsys.readouterr().err


def _job(path: Path) -> Job:
    return Job.create("x", inputs=(parse_tensor_spec("16..64:int64"),), sizes=str(path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i8',",
        b"\x93NUMPY\x01\x00\x3a\x00{'descr': 'O', 'fortran_order': False, 'shape': (9,), }    \n",
        b"\x93NUMPY\x01\x00\x3c\x00{'descr': '<i8', 'fortran_order': False, 'shape': (9**99,)}\n",
        b"\x93NUMPY\x01\x00\x3a\x00{'descr': '<i8', 'fortran_order': False, 'shape': (), }    \n" + b"1" * 8,
        b"\x93NUMPY\x01\x00\x3c\x00{'descr': '<i8', 'fortran_order': False, 'shape': (-5,), } \n" + b"1" * 8,
        b"PK\x03\x04",
        b"PK\x05\x06" + b"\0" * 18,
        b"\x80\x04N.",
        b"\x93NUMPY\x03\x00\xff\xff\xff\x7f{}",
    ],
)
def test_a_broken_array_of_sizes_is_refused(tmp_path: Path, content: bytes) -> None:
    """An array of NumPy that is cut, of objects, without a shape or an archive is an error in one line."""
    path = tmp_path / "sizes.npy"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"^--sizes {path}: ") as caught:
        load_distribution(_job(path))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "line", ["{" * 100_000, '{"length": ' + "9" * 5_000 + "}", "root:x:0:0:root", "5" * 40]
)
def test_a_line_that_is_no_size_is_not_quoted(tmp_path: Path, line: str) -> None:
    """A line of any file may be a secret: its number is named, and not its text."""
    path = tmp_path / "sizes.txt"
    path.write_text(f"16\n{line}\n")
    with pytest.raises(UsageError) as caught:
        load_distribution(_job(path))
    assert str(caught.value) == (f"--sizes {path}, line 2: expected one size of a sample and perhaps a count")


def test_a_number_of_many_digits_is_no_crash(tmp_path: Path) -> None:
    """Whole numbers that Python refuses to write out are named, wherever a file has one."""
    digits = "9" * 5_000
    path = tmp_path / "models.yaml"
    path.write_text(f"a: {{source: 'zoo:CNN', about: a, batch: {digits}}}\n")
    assert run(["max-batch", "--models", str(path), "--model", "a", "--gpu", "L4"]) == 4
    for words in (["--batch", digits], ["--gpu-mib", digits], ["--steps", digits]):
        assert run(["estimate", *RESNET, *words]) == 2
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}})[:-1] + f', "x": {digits}}}')
    assert run(["max-batch", *RESNET, "--gpu", "L4", "--deepspeed", str(path), "--world-size", "2"]) == 2


def test_a_table_with_a_long_list_is_read(tmp_path: Path) -> None:
    """A list of 16,000 lines beside the table is read; each of its lines could be the last."""
    path = tmp_path / "pyproject.toml"
    path.write_text("[other]\na = [\n" + "[1],\n" * 16_000 + "]\n[tool.planner]\nx = 1\n")
    with pytest.raises(UsageError, match=r"line 16005, tool\.planner\.x: unknown key"):
        load_config(path, {}, ())
