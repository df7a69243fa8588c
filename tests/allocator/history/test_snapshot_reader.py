"""Recorded histories as files: our own, snapshots of torch, records of measurements; broken and harmful."""

import gzip
import json
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from calibration.records.load import load_recording
from planner.allocator.config import MIB, UNLIMITED, AllocatorConfig, config_of_torch
from planner.allocator.history import snapshot_pickle
from planner.allocator.history.diff import compare_with_recording
from planner.allocator.history.file import save_history
from planner.allocator.history.history import History, HistoryEvent, HistoryMark
from planner.allocator.history.lifetimes import recording_of
from planner.allocator.history.snapshot_reader import load_snapshot, load_snapshots
from planner.allocator.history.snapshot_writer import make_snapshot, save_snapshot
from planner.errors import DataFileError, UsageError
from planner.jobs import Job, complete_job, parse_tensor_spec
from planner.program.events import Category, Phase, PhaseStart, Site
from tests.helpers.histories import LITERAL, blocks_of, marks_of
from tests.helpers.structs import replace

RULES = AllocatorConfig()


# ---- files

HISTORY = History(
    "Some GPU",
    "2.13.0",
    "",
    None,
    None,
    (
        HistoryEvent("segment_alloc", 2**32, 20 * MIB),
        HistoryEvent("alloc", 2**32, 3 * MIB),
        HistoryEvent("alloc", 2**32 + 4 * MIB, 8 * MIB),
        HistoryEvent("free_requested", 2**32, 3 * MIB),
        HistoryEvent("free_completed", 2**32, 3 * MIB),
        HistoryEvent("alloc", 2**32, 0),
        HistoryEvent("alloc", 2**32, 512),
        HistoryEvent("segment_alloc", 2**33, 4 * MIB),
        HistoryEvent("segment_free", 2**33, 4 * MIB),
    ),
    (HistoryMark(1, 1, Phase.FORWARD),),
)
BLOCKS = [(3 * MIB, 2), (8 * MIB, None), (512, None)]
JOB = Job.create("any", source="zoo:Any")


def test_a_history_becomes_births_and_deaths() -> None:
    """Sizes as requested, deaths in births, empty requests left out, the reserved peak as recorded."""
    record = recording_of(HISTORY, "x")
    assert (record.about, record.config) == ("Some GPU, torch 2.13.0, x", RULES)
    assert (blocks_of(record.events), record.peak_reserved_bytes, record.notes) == (BLOCKS, 24 * MIB, ())
    assert marks_of(record.events) == [(1, PhaseStart(1, Phase.FORWARD))]


def test_our_own_file_is_read(tmp_path: Path) -> None:
    """A history that `calibration` wrote."""
    path = tmp_path / "b8.history.json.gz"
    save_history(HISTORY, path)
    assert load_recording(path, JOB, 8) == recording_of(HISTORY, str(path))


def test_a_late_beginning_is_noted() -> None:
    """A death without a birth, and marks that are not there, are noted; the reserved peak is not used."""
    late = replace(HISTORY, events=HISTORY.events[2:], marks=())
    record = recording_of(late, "x")
    assert record.peak_reserved_bytes is None
    assert record.notes == (
        "1 blocks die that were born before the recording began, or whose birth torch had dropped: record "
        "from before the first tensor, with more entries",
        "the record does not mark where phases begin, so that it is aligned as one row",
    )


def entry(action: str, address: int, size: int, *frames: tuple[str, int, str]) -> dict[str, object]:
    stack = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "frames": stack}


def test_a_snapshot_of_torch_is_read(tmp_path: Path) -> None:
    """Events of the device that has any, with the innermost frame that is the user's."""
    path = tmp_path / "snapshot.pickle"
    stack = (
        ("/x/torch/nn/modules/conv.py", 4, "f"),
        ("<eval>", 1, "e"),
        ("/home/me/net/model.py", 12, "forward"),
    )
    events = [entry("alloc", 4096, 700, *stack), entry("snapshot", 0, 0), entry("user_defined", 0, 0)]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "max_split_size": -1}
    path.write_bytes(
        pickle.dumps({"segments": [], "device_traces": [[], events], "allocator_settings": settings})
    )
    record = load_recording(path, JOB, 8)
    assert blocks_of(record.events) == [(700, None)]
    assert record.sites[0] == Site("net/model.py:12", "forward")
    assert record.config == AllocatorConfig(expandable_segments=True)
    assert record.about == f"GPU 1, torch unknown, {path}"


def test_a_snapshot_is_of_the_version_of_the_job(tmp_path: Path) -> None:
    """A pickle names no torch, so that its blocks are reused as in the version that the job runs."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[entry("alloc", 4096, 700)]]}))
    record = load_recording(path, Job.create("any", source="zoo:Any", torch="2.6"), 8)
    assert (record.about, record.config) == (f"GPU 0, torch 2.6, {path}", config_of_torch("2.6"))


def long_snapshot(count: int) -> bytes:
    """Return the pickle of a snapshot in which blocks are allocated and freed, each with its stack."""
    frames = [{"filename": f"/home/me/net/{name}.py", "line": 1, "name": name} for name in "abc"]
    events = [
        {**entry(action, 2**32 + 512 * place, 512), "time_us": place, "frames": list(frames)}
        for place in range(count // 2)
        for action in ("alloc", "free_completed")
    ]
    return pickle.dumps({"segments": [], "device_traces": [events], "allocator_settings": {}})


@pytest.fixture
def few_events(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let 100 events be the most that are kept, and 100 their parts that others may share."""
    monkeypatch.setattr(snapshot_pickle, "MOST_EVENTS", 100)
    monkeypatch.setattr(snapshot_pickle, "_MOST_PARTS", 100)
    return 100


def test_the_last_events_of_a_long_snapshot_are_read(few_events: int, tmp_path: Path) -> None:
    """The number of all events is noted."""
    path = tmp_path / "long.pickle"
    path.write_bytes(long_snapshot(10_000))
    history = load_snapshot(path)
    addresses = [2**32 + 512 * place for place in range(4950, 5000) for _ in range(2)]
    assert [event.address for event in history.events] == addresses
    assert history.notes[0] == "of the 10,000 events of the snapshot the last 100 are read"
    assert {history.sites[event.site] for event in history.events} == {Site("net/a.py:1", "a")}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("depth", [0, 1, 40, 2500])
def test_a_stack_in_parts_is_one(protocol: int, depth: int, tmp_path: Path) -> None:
    """The user's frame is found at any depth: some protocols append frames one by one, others by 1,000."""
    frames = [("/x/torch/nn/modules/conv.py", 4, "f")] * depth + [("/home/me/net.py", 7, "g")] * 2
    path = tmp_path / "snapshot.pickle"
    events = [entry("alloc", 2**32, 512, *frames), entry("free_completed", 2**32, 512)]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}, protocol=protocol))
    history = load_snapshot(path)
    assert [history.sites[event.site].module for event in history.events] == ["me/net.py:7", ""]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_function_that_tells_the_category_may_come_late(protocol: int, tmp_path: Path) -> None:
    """Protocols that append frames one by one give the same category as those that append all at once."""
    frames = [("/home/me/net.py", 7, "g"), ("/x/torch/optim/adam.py", 4, "step")]
    path = tmp_path / "snapshot.pickle"
    events = [entry("alloc", 2**32, 512, *frames), entry("alloc", 2**33, 512)]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}, protocol=protocol))
    history = load_snapshot(path)
    assert [history.categories[event.site] for event in history.events] == [Category.OPTIMIZER, None]


def test_events_may_be_shared(few_events: int, tmp_path: Path) -> None:
    """An event in the lists of two devices is read for both, unless many events lie between them."""
    path, first = tmp_path / "snapshot.pickle", entry("alloc", 2**32, 512)
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[first], [first]]}))
    assert [len(history.events) for history in load_snapshots(path)] == [1, 1]
    others = [entry("alloc", 2**33 + 512 * place, 512) for place in range(2000)]
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[first, *others], [first]]}))
    with pytest.raises(DataFileError, match="it refers to an event too many events ago"):
        load_snapshots(path)


def test_memory_does_not_grow_with_the_events_of_a_snapshot(few_events: int, tmp_path: Path) -> None:
    """Four times the events take as much memory while the file is read."""
    path, peaks = tmp_path / "long.pickle", []
    for count in (10_000, 40_000):
        path.write_bytes(long_snapshot(count))
        tracemalloc.start()
        load_snapshot(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.05 * peaks[0]


def test_a_stack_is_known_as_long_as_stacks_are_kept(few_events: int, tmp_path: Path) -> None:
    """A free with the stack of an allocation that is too long ago has no site."""
    frames = [{"filename": "/home/me/net/a.py", "line": 1, "name": "f"}]
    first = {**entry("alloc", 2**32, 512), "frames": frames}
    between = [{**entry("alloc", 2**33 + 512 * place, 512), "frames": list(frames)} for place in range(2000)]
    last = {**entry("free_completed", 2**32, 512), "frames": frames}
    sites = []
    for events in ([first, last], [first, *between, last]):
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}))
        history = load_snapshot(path)
        sites.append(history.sites[history.events[-1].site])
    assert sites == [Site("net/a.py:1", "f"), Site("", "")]


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x1f", b"p536870911\n"])
def test_a_snapshot_that_takes_all_memory_is_refused(put: bytes, tmp_path: Path) -> None:
    """A few bytes that remember an object at place 2**29 would take 8 GiB, wherever they stand."""
    texts = b"\x8c\x03abcX\x02\x00\x00\x00xyK\x07"
    path = tmp_path / "hostile.pickle"
    path.write_bytes(b"\x80\x04]" + texts + put + b".")
    tracemalloc.start()
    with pytest.raises(DataFileError, match="no mapping with device_traces"):
        load_snapshot(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2**20


def test_a_snapshot_of_ours_is_the_trace(tmp_path: Path) -> None:
    """A snapshot of `--snapshot` is read by `--against` without a difference."""
    path = tmp_path / "snapshot.pickle"
    save_snapshot(LITERAL, UNLIMITED, path)
    assert compare_with_recording(LITERAL, load_recording(path, JOB, 8)).is_empty


class Harmful:
    """Unpickled as usual, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_executed(protocol: int, tmp_path: Path) -> None:
    """A pickle that names a function is refused in one line, and the function is not called."""
    path, made = tmp_path / "x.pickle", tmp_path / "made"
    path.write_bytes(pickle.dumps({"device_traces": [[Harmful(made)]]}, protocol=protocol))
    with pytest.raises(DataFileError) as caught:
        load_recording(path, JOB, 8)
    assert str(caught.value) == (
        f"{path}: broken memory snapshot: it names posix.mkdir, which no snapshot does; dump it again"
    )
    assert not made.exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([], "no mapping with device_traces"),
        ({"device_traces": 3}, "no mapping with device_traces"),
        ({"device_traces": [3]}, "device_traces: expected a list of events for each device"),
        ({"device_traces": [[]] * 65}, "device_traces: expected a list of events for each device"),
        (
            {"device_traces": [[], []]},
            "no history was recorded: call torch.cuda.memory._record_memory_history() first",
        ),
        ({"device_traces": [[{"addr": 1}]]}, "device_traces: an event without an action"),
        (
            {"device_traces": [[entry("alloc", -1, 7)]]},
            "device_traces: addr is -1, which is no size, address or stream",
        ),
        (
            {"device_traces": [[entry("alloc", 1, True)]]},
            "device_traces: size is true, which is no size, address or stream",
        ),
    ],
)
def test_a_broken_snapshot_is_refused(content: object, problem: str, tmp_path: Path) -> None:
    """A file without a snapshot's history is refused in one line with the reason."""
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(DataFileError) as caught:
        load_snapshot(path)
    assert str(caught.value) == f"{path}: broken memory snapshot: {problem}; dump it again"


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_pickles_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    """One byte changed or the end cut off: an error of ours, or a snapshot, but nothing else."""
    path = tmp_path_factory.mktemp("damaged") / "x.pickle"
    whole = bytearray(pickle.dumps(make_snapshot(LITERAL, UNLIMITED), protocol=4))
    whole[at % len(whole)] = byte
    for content in (bytes(whole), bytes(whole[: at % len(whole)])):
        path.write_bytes(content)
        try:
            load_snapshot(path)
        except DataFileError as error:
            assert "\n" not in str(error)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    """A missing history is one line with its path."""
    path = tmp_path / "none"
    with pytest.raises(DataFileError, match="none: cannot read the history: No such file or directory"):
        load_recording(path, JOB, 8)


WHAT = {
    **{"model": "torchvision:resnet50", "inp": "3x224x224", "target": "10", "loss": "cross_entropy"},
    **{"precision": "fp32", "optimizer": "sgd", "impl": "foreach", "memory_format": "contiguous"},
    **{"mode": "train", "zero_grad": "before-forward", "benchmark": False, "alloc_conf": ""},
    "kwargs": {"num_classes": 10},
}
MACHINE = {
    **{
        "gpu": "Some GPU",
        "capability": [8, 0],
        "total_torch": 40_000 * MIB,
        "torch": "2.9.0",
        "cuda": "12.8",
    },
    **{"torchvision": "0.24.0", "cudnn": 91002, "driver": "570.12", "nvml_total": 40_960 * MIB},
    **{"alloc_conf": None, "tf32_matmul": False, "tf32_cudnn": True},
}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A folder of the measuring script with one history, of a ResNet-50 at batch 32."""
    (tmp_path / "versions.json").write_text(json.dumps(MACHINE))
    events = [[event.action, event.address, event.size_bytes] for event in HISTORY.events]
    result = {"events": events, "marks": [["built", 0], ["model", 0], ["forward0", 2], ["backward0", 3]]}
    record = {"key": "k", "kind": "history", "job": WHAT, "arg": 32, "ok": True, "result": result}
    (tmp_path / "history.jsonl.gz").write_bytes(gzip.compress((json.dumps(record) + "\n").encode()))
    return tmp_path


def resnet(classes: int = 10) -> Job:
    return complete_job(
        Job.create(
            "mine",
            model_args=(("num_classes", classes),),
            inputs=(parse_tensor_spec("3x224x224"),),
            target=parse_tensor_spec("10"),
            source="torchvision:resnet50",
            steps=7,
        )
    )


@pytest.mark.parametrize("name", ["", "history.jsonl.gz"])
def test_measuring_records_are_read(name: str, records: Path) -> None:
    """A folder, or its file of histories, gives the record of this model at this batch size."""
    record = load_recording(records / name, resnet(), 32)
    assert blocks_of(record.events) == BLOCKS
    marks = [(1, PhaseStart(1, Phase.FORWARD)), (2, PhaseStart(1, Phase.BACKWARD))]
    assert marks_of(record.events)[1:] == marks


@pytest.mark.parametrize(("classes", "batch"), [(10, 64), (1000, 32)])
def test_records_of_something_else_are_refused(classes: int, batch: int, records: Path) -> None:
    """Another batch size or another model is no record of this job, and the error states what there is."""
    with pytest.raises(UsageError) as caught:
        load_recording(records, resnet(classes), batch)
    assert str(caught.value) == (
        f"--against {records}: no history of this job at batch {batch}; "
        "it has torchvision:resnet50 at batch 32"
    )
