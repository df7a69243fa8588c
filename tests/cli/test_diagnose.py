"""`planner diagnose`, as a person with a dead process calls it."""

import gzip
import io
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cli import run
from planner.planning.diagnosis import Cause
from tests.helpers.command_line import Capture, outcome

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 8.00 GiB total "
    "capacity; 6.75 "
    "GiB already allocated; 0 bytes free; 7.50 GiB reserved in total by PyTorch)\n"
)
REPORT = """\
The memory was reserved, but fragmented
Because:        768.0 MiB were reserved and unused, more than the 64.0 MiB asked for, but in pieces
Memory:         64.0 MiB asked for, 6,912.0 MiB allocated, 7,680.0 MiB reserved, 8,192.0 MiB total
Source:         log

In use                                                                               blocks      MiB
  tensors and workspaces of PyTorch                                                          6,912.0
  reserved by PyTorch and unused                                                               768.0
  neither free nor of PyTorch in this process: contexts, libraries, other processes            512.0

With PYTORCH_CUDA_ALLOC_CONF  fits  MiB reserved  because
  expandable_segments:True    no                  torch has it since 2.1, and the message is of an
                                                  older torch

Noted
  - no traceback is before the message, so the code that asked is not known
  - a message shows the moment of the failure alone: a history
    (torch.cuda.memory._record_memory_history, since torch 2.1) tells whether memory grew
"""


def answer(file: Path, capsys: Capture) -> dict[str, Any]:
    """Return the JSON of a file's diagnosis."""
    assert run(["diagnose", str(file), "--json"]) == 0
    fields: dict[str, Any] = json.loads(capsys.readouterr().out)
    return fields


def test_a_log_as_a_person_reads_it(tmp_path: Path, capsys: Capture) -> None:
    """The cause stands first, then the figures that decide it."""
    log = tmp_path / "train.log"
    log.write_text(f"step 1\n{MESSAGE}")
    assert outcome(f"diagnose {log}", capsys) == (0, REPORT, "")


def test_a_trace_of_the_profiler(tmp_path: Path, capsys: Capture) -> None:
    """The memory that was in use, by operator, and that no setting of the allocator makes the GPU larger."""
    sizes = {"Bytes": 2**33, "Total Allocated": 2**33, "Total Reserved": 2**33}
    first = {"Device Id": 0, "Device Type": 1, "Addr": 4096} | sizes
    failed = {"Device Id": 0, "Device Type": 1} | sizes
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::relu", "tid": 1, "ts": 1, "dur": 9, "args": {}},
        {"ph": "i", "name": "[memory]", "tid": 1, "ts": 2, "args": first},
        {"ph": "i", "name": "[OutOfMemory]", "tid": 1, "ts": 3, "args": failed},
    ]
    file = tmp_path / "trace.json"
    gpu = {"id": 0, "name": "NVIDIA L4", "totalGlobalMem": 3 * 2**32}
    file.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [gpu], "traceEvents": events}))
    fields = answer(file, capsys)
    assert (fields["cause"], fields["source"]) == ("too_large", "trace of torch.profiler, NVIDIA L4")
    assert fields["site"]["line"] == "aten::relu"
    assert {setting["fits"] for setting in fields["would_help"]} == {False}


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """`planner diagnose -` reads what another program writes."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MESSAGE.encode())))
    assert outcome("diagnose -", capsys) == (0, REPORT, "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (RuntimeError("CUDA out of memory"), "not RuntimeError: write an error's traceback"),
        (MESSAGE.encode(), "not bytes"),
        (MESSAGE, "not its text 'torch.OutOfMemoryError: CUDA out of memory"),
        (MESSAGE.strip(), "write the text to a file"),
        (100 * MESSAGE, "write the text to a file"),
        ("loss 0.3\nKilled\n\0", "write the text to a file"),
    ],
)
def test_what_is_no_path_is_refused_with_what_to_give(given: Any, words: str) -> None:
    """An error, or the text of a log, in place of its file: the message is short, and says what to do."""
    with pytest.raises(planner.errors.UsageError, match=re.escape(words)) as found:
        planner.diagnose(given)
    assert len(str(found.value)) < 250


def test_a_log_that_gzip_packed(tmp_path: Path) -> None:
    """As log rotation leaves it; a log without a message is named as one."""
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress(b"step 1\n" + MESSAGE.encode()))
    assert planner.diagnose(path).diagnosis.cause is Cause.FRAGMENTATION
    path.write_bytes(gzip.compress(b"step 1\n"))
    with pytest.raises(planner.errors.DataFileError, match="no out-of-memory message"):
        planner.diagnose(path)


def test_a_log_that_is_no_text(tmp_path: Path, capsys: Capture) -> None:
    """Bytes that are no text, and lines without an end, do not hide a message after them."""
    log = tmp_path / "train.log"
    log.write_bytes(b"\x9c\xff" * 100_000 + b"\r\n" + MESSAGE.replace("\n", "\r\n").encode())
    assert answer(log, capsys)["cause"] == "fragmentation"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_a_log_as_windows_writes_it(tmp_path: Path, capsys: Capture, encoding: str) -> None:
    """PowerShell redirects what a program prints to UTF-16, with a mark of the order of bytes."""
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    log = tmp_path / "train.log"
    log.write_bytes((mark + MESSAGE.replace("\n", "\r\n")).encode(encoding))
    assert outcome(f"diagnose {log}", capsys) == (0, REPORT, "")


def test_a_log_of_json_lines(tmp_path: Path, capsys: Capture) -> None:
    """Clusters write each line as an object, so that a log begins as a record of `planner run` does."""
    log = tmp_path / "pod.log"
    log.write_text(
        "".join(json.dumps({"log": line, "stream": "stderr"}) + "\n" for line in ("step 1", MESSAGE))
    )
    assert answer(log, capsys)["requested_mib"] == 64.0


def test_a_snapshot(tmp_path: Path, capsys: Capture) -> None:
    """The device whose request failed answers, not the one with the most events."""
    frames = [{"filename": "/home/u/net.py", "line": 7, "name": "forward"}]
    block = {"action": "alloc", "addr": 0, "size": 2**21, "stream": 0, "frames": frames}
    failed = {"action": "oom", "size": 2**20, "stream": 0, "frames": frames}
    grown = {"action": "segment_alloc", "addr": 0, "size": 2**21, "stream": 0, "frames": []}
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(
        pickle.dumps({"device_traces": [[grown, block, block, block], [grown, block, failed]]})
    )
    fields = answer(snapshot, capsys)
    assert (fields["source"], fields["cause"], fields["requested_mib"]) == (
        "memory snapshot of torch",
        "too_large",
        1,
    )
    assert fields["site"]["line"] == "u/net.py:7 in forward"
    assert fields["live"] == [{"what": "u/net.py:7 in forward", "mib": 2, "blocks": 1}]


def test_a_snapshot_without_a_history_shows_its_blocks(tmp_path: Path, capsys: Capture) -> None:
    """What `planner.watch()` writes without `record` has blocks and no events."""
    blocks = [
        {"size": size * 2**20, "state": state} for size, state in ((8, "active_allocated"), (12, "inactive"))
    ]
    segment = {"device": 0, "address": 2**40, "total_size": 20 * 2**20, "stream": 0, "blocks": blocks}
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(pickle.dumps({"device_traces": [[]], "segments": [segment]}))
    fields = answer(snapshot, capsys)
    assert (fields["cause"], fields["allocated_mib"], fields["reserved_mib"]) == ("unknown", 8, 20)
    assert fields["live"] == [{"what": "blocks of 8.0 MiB", "mib": 8, "blocks": 1}]


def test_a_large_snapshot_says_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of millions of events takes minutes, which are announced; a small one is read at once."""
    path, messages = tmp_path / "s.pickle", list[str]()
    segment = {"address": 2**32, "total_size": 2**21, "blocks": [{"size": 2**21, "state": "inactive"}]}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[]]}, protocol=4))
    planner.diagnose(path, on_progress=messages.append)
    assert messages == []
    monkeypatch.setattr("planner.api.diagnose._SLOW_SNAPSHOT_BYTES", 0)
    planner.diagnose(path, on_progress=messages.append)
    assert messages == ["reading 0 MiB, which takes a minute for every 300"]


def test_a_record_of_a_run(tmp_path: Path, capsys: Capture) -> None:
    """Peaks that rise in each step are growth, with the step at which the memory ends."""
    steps = [
        {"first": at, "last": at, "peak_allocated_mib": 1000 + 100 * at, "peak_reserved_mib": 0}
        for at in range(1, 7)
    ]
    failure = {"step": 7, "phase": "forward", "module": "net.0", "line": "a.py:9", "requested_mib": 64.0}
    record = {"emulated": True, "gpu": "T4", "exit_code": 1, "steps": steps, "failure": failure}
    record |= {"peak_allocated_mib": 1600.0, "peak_reserved_mib": 1700.0}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(record))
    fields = answer(file, capsys)
    assert (fields["cause"], fields["site"]) == (
        "growth",
        {"line": "a.py:9, module net.0", "operator": "forward"},
    )
    assert fields["reason"] == (
        "the peak rises 4 times and never falls, from 1,200.0 MiB in step 2 to 1,600.0 MiB in step 6; "
        "memory ends in step 7, forward"
    )


@pytest.mark.slow
def test_with_a_job_the_smallest_changes_follow(tmp_path: Path, capsys: Capture) -> None:
    """The options are those of `planner advise`, and its report and JSON go on below."""
    log = tmp_path / "train.log"
    log.write_text(MESSAGE)
    job = "--model cnn --batch 4096 --gpu-mib 2000 --json"
    code, out, _ = outcome(f"diagnose {log} {job}", capsys)
    advice, advised = json.loads(out)["advice"], json.loads(outcome(f"advise {job}", capsys)[1])
    assert (code, sorted(advice)) == (0, sorted(advised))
    assert [one["changes"] for one in advice["sets"]] == [one["changes"] for one in advised["sets"]]
    assert advice["sets"]


def test_options_of_a_job_need_its_model(tmp_path: Path, capsys: Capture) -> None:
    """A GPU alone would be ignored, so that it is refused."""
    log = tmp_path / "train.log"
    log.write_text(MESSAGE)
    line = "planner: --model is missing: the options of a job and of a GPU are those of planner advise\n"
    assert outcome(f"diagnose {log} --gpu L4", capsys) == (2, "", line)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"epoch 1 loss 0.3\n", "has no out-of-memory message of PyTorch"),
        (b"", "has no out-of-memory message of PyTorch"),
        (b"\x80\x04N.", "broken memory snapshot"),
        (b"\x1f\x8b broken", "broken allocator history"),
        (b'{"emulated": true}', "no record of planner run --json"),
        (
            b'{"emulated": true, "peak_allocated_mib": "x", "peak_reserved_mib": 1}',
            "no record of planner run",
        ),
    ],
)
def test_a_file_that_tells_nothing_is_exit_4(
    tmp_path: Path, capsys: Capture, content: bytes, why: str
) -> None:
    """One line says what is wrong with it."""
    file = tmp_path / "file"
    file.write_bytes(content)
    code, out, err = outcome(f"diagnose {file}", capsys)
    assert (code, out, why in err, len(err.splitlines())) == (4, "", True, 1)


def test_a_missing_file(tmp_path: Path, capsys: Capture) -> None:
    """The path and the reason are told; without a path, what to give."""
    code, _, err = outcome(f"diagnose {tmp_path / 'none.log'}", capsys)
    assert (code, err) == (
        4,
        f"planner: {tmp_path / 'none.log'}: cannot be read: No such file or directory\n",
    )
    assert outcome("diagnose", capsys)[0] == 2
