"""Traces held against recordings: exact alignment, what is found, named and counted; files that are read."""

import gzip
import json
import os
import pickle
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from calibration.records.load import load_recording, recording_of
from planner.allocator.config import MIB, AllocatorConfig
from planner.allocator.history.diff import (
    Difference,
    Extra,
    Kind,
    LifeDifference,
    OpTotal,
    SidePeak,
    compare_with_recording,
)
from planner.allocator.history.file import save_history
from planner.allocator.history.history import History, HistoryEvent, HistoryMark
from planner.allocator.history.lcs import align_rows
from planner.allocator.history.sequences import RecordedBlock, RecordedMark, Recording
from planner.allocator.history.snapshot_reader import load_snapshot
from planner.allocator.history.snapshot_writer import make_snapshot, save_snapshot
from planner.allocator.replay import UNLIMITED
from planner.errors import DataFileError, UsageError
from planner.jobs import Job, complete_job, parse_tensor_spec
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace
from planner.program.program import Program
from planner.report.commands.explain.diff import difference_sections, group_extras
from planner.report.document import Document
from planner.report.plain import render_plain
from tests.helpers.structs import replace
from tests.helpers.traces import UNTIMED, programs

RULES = AllocatorConfig()

# ---- alignment


def longest(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common subsequence by the textbook's table."""
    row = [0] * (len(second) + 1)
    for one in first:
        above = row
        row = [0]
        for column, other in enumerate(second):
            row.append(above[column] + 1 if one == other else max(above[column + 1], row[column]))
    return row[-1]


_rows = st.lists(st.integers(0, 4), max_size=24)


@UNTIMED
@given(_rows, _rows, st.sampled_from([1, 7, 40, 2**30]))
def test_rows_are_aligned_as_far_as_they_can_be(first: list[int], second: list[int], most: int) -> None:
    """Pairs rise, are equal, and are as many as the textbook finds, however little memory there is."""
    pairs = align_rows(first, second, most)
    assert all(first[one] == second[other] for one, other in pairs)
    assert all(a[0] < b[0] and a[1] < b[1] for a, b in zip(pairs, pairs[1:], strict=False))
    assert len(pairs) == longest(first, second)


# ---- synthetic recordings


def blocks_of(trace: Trace, batch: int) -> list[tuple[int, int | None]]:
    """Size and death (births before it) of each block of a trace."""
    births: list[tuple[int, int | None]] = []
    place: dict[int, int] = {}
    for event in trace.events:
        if isinstance(event, Alloc):
            place[event.block] = len(births)
            births.append((event.size_bytes, None))
        elif isinstance(event, Free):
            index = place[event.block]
            births[index] = births[index][0], len(births)
    return births


def marks_of(trace: Trace) -> tuple[RecordedMark, ...]:
    births = 0
    marks = []
    for event in trace.events:
        births += isinstance(event, Alloc)
        if isinstance(event, PhaseStart):
            marks.append(RecordedMark(births, event.step, event.phase))
    return tuple(marks)


def recorded(trace: Trace, batch: int, marks: tuple[RecordedMark, ...] | None = None) -> Recording:
    """What a GPU would record that did as the trace says."""
    blocks = tuple(RecordedBlock(size, died) for size, died in blocks_of(trace, batch))
    return Recording("a GPU", RULES, blocks, marks_of(trace) if marks is None else marks, None)


def changed(recording: Recording, dropped: set[int], added: dict[int, int]) -> Recording:
    """The recording without some blocks, and with blocks of these sizes that die at once, each before the
    block of its index.
    """
    new: list[RecordedBlock] = []
    place = []  # for each old count of births, the new one
    for index in range(len(recording.blocks) + 1):
        if index in added:
            new.append(RecordedBlock(added[index], len(new) + 1))
        place.append(len(new))
        if index < len(recording.blocks) and index not in dropped:
            new.append(recording.blocks[index])
    old = {id(block) for block in recording.blocks}
    moved = [
        replace(block, died=place[block.died]) if id(block) in old and block.died is not None else block
        for block in new
    ]
    # A mark stands before what is added at its place.
    marks = tuple(
        replace(mark, births=place[mark.births] - (mark.births in added)) for mark in recording.marks
    )
    return replace(recording, blocks=tuple(moved), marks=marks)


@UNTIMED
@given(programs(), st.booleans())
def test_a_recording_of_the_trace_itself_has_no_difference(program: Program, marked: bool) -> None:
    """What the GPU did as traced is found the same, block by block, with marks and without."""
    trace = program.instantiate(4)
    recording = recorded(trace, 4, None if marked else ())
    found = compare_with_recording(trace, 4, recording)
    assert found.is_empty
    assert (found.matched, found.traced) == (found.traced_births, found.recorded)
    assert found.traced.alone_bytes == 0


@UNTIMED
@given(programs(), st.data(), st.booleans())
def test_random_insertions_and_deletions_are_recovered(
    program: Program, data: st.DataObject, marked: bool
) -> None:
    """Blocks of sizes that the trace does not have are found where they were put, each with its size; of
    those taken away exactly the sizes are missed.
    """
    trace = program.instantiate(4)
    recording = recorded(trace, 4, None if marked else ())
    count = len(recording.blocks)
    indices = st.integers(0, max(count - 1, 0))
    dropped = data.draw(st.sets(indices, max_size=min(count, 6))) if count else set()
    added = data.draw(st.dictionaries(st.integers(0, count), st.integers(0, 10**6), max_size=6))
    added = {index: 2**50 + 512 * (size * 10 + number) for number, (index, size) in enumerate(added.items())}
    other = changed(recording, dropped, added)
    found = compare_with_recording(trace, 4, other)
    sizes = [RULES.block_bytes(block.requested_bytes) for block in recording.blocks]
    new = [extra for extra in found.extras if extra.kind in (Kind.WORKSPACE, Kind.BLOCK)]
    missed = [extra for extra in found.extras if extra.kind in (Kind.TENSOR, Kind.SCRATCH)]
    assert [extra.size_bytes for extra in new] == [added[index] for index in sorted(added)]
    assert [other.blocks[extra.birth].requested_bytes for extra in new] == [added[i] for i in sorted(added)]
    assert all(extra.kind is Kind.WORKSPACE for extra in new)
    assert sorted(extra.size_bytes for extra in missed) == sorted(sizes[index] for index in dropped)
    assert found.matched == count - len(dropped)


# ---- names

CONV, NORM, COPY = "aten.convolution.default", "aten.native_batch_norm.default", "aten.copy"
SITES = (Site("", COPY), Site("a.conv", CONV), Site("a.norm", NORM))
EVENTS = (
    *(PhaseStart(1, Phase.INPUTS), Alloc(0, 3 * MIB, Category.INPUT, 0)),
    *(
        PhaseStart(1, Phase.FORWARD),
        Alloc(1, 8 * MIB, Category.ACTIVATION, 1),
        Alloc(2, 8 * MIB, Category.TEMPORARY, 2),
    ),
    *(
        Alloc(3, 1024, Category.WORKSPACE, 2),
        Free(3),
        Free(2),
        Alloc(4, 5 * MIB, Category.ACTIVATION, 1),
    ),
    PhaseStart(1, Phase.END),
)
LITERAL = Trace(EVENTS, SITES, 8)
MARKS = (RecordedMark(0, 1, Phase.INPUTS), RecordedMark(1, 1, Phase.FORWARD))


def against(*blocks: tuple[int, int | None], trace: Trace = LITERAL) -> Difference:
    made = tuple(RecordedBlock(*block) for block in blocks)
    return compare_with_recording(trace, 8, Recording("a GPU", RULES, made, MARKS, 40 * MIB))


SAME = ((3 * MIB, None), (8 * MIB, None), (8 * MIB, 4), (1024, 4), (5 * MIB, None))


def test_a_workspace_is_named_by_the_operator_that_it_follows() -> None:
    """What dies before the next block that both have, after a convolution's result, is its workspace."""
    found = against(SAME[0], SAME[1], (6 * MIB, 3), (8 * MIB, 5), (1024, 5), SAME[4])
    assert found == Difference(
        about="a GPU",
        traced_births=5,
        recorded_births=6,
        matched=5,
        phases=2,
        extras=(Extra(Kind.WORKSPACE, 2, 6 * MIB, 1, Phase.FORWARD, "a.conv", CONV, "", False),),
        lives=(),
        ops=(
            OpTotal(CONV, 2, 13 * MIB, 0, 0, 1, 6 * MIB),
            OpTotal(NORM, 2, 8 * MIB + 1024, 0, 0, 0, 0),
            OpTotal(COPY, 1, 3 * MIB, 0, 0, 0, 0),
        ),
        traced=SidePeak(20 * MIB + 1024, 22 * MIB, 0),
        recorded=SidePeak(20 * MIB + 1024, 40 * MIB, 0),
        notes=(),
    )


def test_after_a_death_a_block_belongs_to_the_next_operator() -> None:
    """A death says that an operator has ended, so that what follows stands in the next one."""
    found = against(*SAME[:4], (6 * MIB, 5), (5 * MIB, None))
    assert [(extra.kind, extra.op, extra.module) for extra in found.extras] == [
        (Kind.WORKSPACE, CONV, "a.conv")
    ]


def test_a_block_that_lives_on_is_no_workspace() -> None:
    """What outlives blocks that both have is told as a block."""
    found = against(SAME[0], SAME[1], (6 * MIB, None), (8 * MIB, 5), (1024, 5), SAME[4])
    assert [(extra.kind, extra.at_peak) for extra in found.extras] == [(Kind.BLOCK, True)]
    assert found.recorded.alone_bytes == 6 * MIB
    assert (found.traced.allocated_bytes, found.recorded.allocated_bytes) == (
        20 * MIB + 1024,
        25 * MIB + 1024,
    )


def test_what_the_gpu_does_not_make_is_a_tensor_or_scratch() -> None:
    """A traced block without a partner is told as what the trace took it for."""
    found = against(SAME[0], SAME[1], SAME[4])
    assert [(extra.kind, extra.birth, extra.op) for extra in found.extras] == [
        (Kind.TENSOR, 2, NORM),
        (Kind.SCRATCH, 3, NORM),
    ]
    assert found.traced.alone_bytes == 8 * MIB + 1024


def test_a_workspace_as_large_as_the_result_is_told_from_it() -> None:
    """Of two blocks of the same size the one with the traced life is the result."""
    found = against(SAME[0], (8 * MIB, None), (8 * MIB, 3), (8 * MIB, 5), (1024, 5), SAME[4])
    assert [(extra.kind, extra.birth) for extra in found.extras] == [(Kind.WORKSPACE, 2)]
    assert found.lives == ()


def test_a_life_that_ends_elsewhere_is_told() -> None:
    """A block that both have and that dies after one more birth than traced outlives it by one."""
    found = against(SAME[0], SAME[1], (8 * MIB, None), SAME[3], SAME[4])
    assert found.extras == ()
    assert found.lives == (LifeDifference(2, 8 * MIB, 1, Phase.FORWARD, "a.norm", NORM, 1),)


def test_phases_are_aligned_each_by_itself() -> None:
    """A block of the right size in the wrong phase has no partner."""
    found = against((8 * MIB, None), (3 * MIB, None), (8 * MIB, 4), (1024, 4), (5 * MIB, None))
    assert [(extra.kind, extra.phase, extra.size_bytes) for extra in found.extras] == [
        (Kind.BLOCK, Phase.INPUTS, 8 * MIB),
        (Kind.TENSOR, Phase.INPUTS, 3 * MIB),
        (Kind.BLOCK, Phase.FORWARD, 3 * MIB),
        (Kind.TENSOR, Phase.FORWARD, 8 * MIB),
    ]


def test_an_empty_recording_lacks_everything() -> None:
    """Without a single recorded block all traced ones are told."""
    found = against()
    assert (found.matched, len(found.extras), found.recorded.allocated_bytes) == (0, 5, 0)


def difference_text(found: Difference, top: int) -> str:
    return render_plain(Document.of(*difference_sections(found, top)))


def test_repeated_extras_are_told_once() -> None:
    """Equal extras of several steps are one group, and the text says which steps."""
    extra = Extra(Kind.WORKSPACE, 2, 6 * MIB, 1, Phase.FORWARD, "a.conv", CONV, "net.py:3 forward", False)
    steps = tuple(replace(extra, step=step) for step in (1, 2, 3))
    smaller = replace(extra, size_bytes=512, step=2)
    found = replace(against(*SAME), extras=(*steps, smaller))
    groups = group_extras(found)
    assert [(group.size_bytes, group.steps, group.bytes) for group in groups] == [
        (6 * MIB, (1, 2, 3), 18 * MIB),
        (512, (2,), 512),
    ]
    text = difference_text(found, 1)
    assert "forward, convolution in a.conv, steps 1 to 3 (net.py:3 forward)" in " ".join(text.split())
    assert "\nand 1 more, 0.00 MiB in all; --top shows them\n" in text
    assert "  - workspace: recorded, gone before the next block that both have" in text


def test_a_model_that_was_there_before_the_recording_is_told_in_one_line() -> None:
    """The blocks of the set-up that a late recording lacks are summed up."""
    parameters = [
        Extra(Kind.TENSOR, index, 512 * index, 0, Phase.SETUP, "a", "to", "", True) for index in (1, 2, 3)
    ]
    text = " ".join(difference_text(replace(against(*SAME), extras=tuple(parameters)), 5).split())
    assert "tensor 0.00 in all 3 blocks of the model as it is placed on the GPU: did the recording" in text
    assert "setup, to" not in text


def test_sameness_is_said() -> None:
    """Where there is nothing to tell, the text says so."""
    text = difference_text(against(*SAME), 5)
    assert text.endswith("\n\nTrace and recording are the same, block by block")


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
BLOCKS = (RecordedBlock(3 * MIB, 2), RecordedBlock(8 * MIB, None), RecordedBlock(512, None))
JOB = Job("any", source="zoo:Any")


def test_a_history_becomes_births_and_deaths() -> None:
    """Sizes as asked for, deaths in births, empty requests left out, the reserved peak as recorded."""
    marks = (RecordedMark(1, 1, Phase.FORWARD),)
    expected = Recording("Some GPU, torch 2.13.0, x", RULES, BLOCKS, marks, 24 * MIB)
    assert recording_of(HISTORY, "x") == expected


def test_our_own_file_is_read(tmp_path: Path) -> None:
    """A history that `calibration` wrote."""
    path = tmp_path / "b8.history.json.gz"
    save_history(HISTORY, path)
    assert load_recording(path, JOB, 8) == recording_of(HISTORY, str(path))


def test_what_began_late_is_said() -> None:
    """A death without a birth, and marks that are not there, are noted; the reserved peak is not believed."""
    late = replace(HISTORY, events=HISTORY.events[2:], marks=())
    found = recording_of(late, "x")
    assert found.peak_reserved_bytes is None
    assert found.notes == (
        "1 blocks die that were born before the recording began, or whose birth torch had dropped: record "
        "from before the first tensor, with more entries",
        "the record does not say where phases begin, so that it is aligned as one row",
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
    found = load_recording(path, JOB, 8)
    assert found.blocks == (RecordedBlock(700, None, "net/model.py:12 forward"),)
    assert found.config == AllocatorConfig(expandable_segments=True)
    assert found.about == f"GPU 1, torch unknown, {path}"


@pytest.mark.parametrize("put", [b"r\xff\xff\xff\x1f", b"p536870911\n"])
def test_a_snapshot_that_asks_for_all_memory_is_refused(put: bytes, tmp_path: Path) -> None:
    """A few bytes that remember an object at place 2**29 would take 8 GiB, wherever they stand."""
    texts = b"\x8c\x03abcX\x02\x00\x00\x00xyK\x07"
    path = tmp_path / "hostile.pickle"
    path.write_bytes(b"\x80\x04]" + texts + put + b".")
    tracemalloc.start()
    with pytest.raises(DataFileError, match="it remembers an object at place 536870911 of 2[0-9] bytes"):
        load_snapshot(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2**20


def test_a_snapshot_of_ours_is_the_trace(tmp_path: Path) -> None:
    """What `--snapshot` writes is read by `--against` without a difference."""
    path = tmp_path / "snapshot.pickle"
    save_snapshot(LITERAL, 8, UNLIMITED, path)
    assert compare_with_recording(LITERAL, 8, load_recording(path, JOB, 8)).is_empty


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
        f"{path}: broken memory snapshot: it names posix.mkdir, which no snapshot does; dump it anew"
    )
    assert not made.exists()


GOOD = {"device_traces": [[entry("alloc", 4096, 700)]]}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ([], "no mapping with device_traces"),
        ({"device_traces": 3}, "no mapping with device_traces"),
        ({"device_traces": [3]}, "device_traces: a list of events for each device is wanted"),
        ({"device_traces": [[]] * 65}, "device_traces: a list of events for each device is wanted"),
        (
            {"device_traces": [[], []]},
            "no history was recorded: call torch.cuda.memory._record_memory_history() first",
        ),
        ({"device_traces": [[{"addr": 1}]]}, "device_traces: an event without an action"),
        ({"device_traces": [[entry("alloc", -1, 7)]]}, "device_traces: addr '-1' is no size or address"),
        ({"device_traces": [[entry("alloc", 1, True)]]}, "device_traces: size 'True' is no size or address"),
    ],
)
def test_a_broken_snapshot_is_refused(said: object, problem: str, tmp_path: Path) -> None:
    """What is no snapshot with a history is refused in one line that says why."""
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps(said))
    with pytest.raises(DataFileError) as caught:
        load_snapshot(path)
    assert str(caught.value) == f"{path}: broken memory snapshot: {problem}; dump it anew"


@UNTIMED
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_damaged_pickles_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    """One byte changed or the end cut off: an error of ours, or a snapshot, but nothing else."""
    path = tmp_path_factory.mktemp("damaged") / "x.pickle"
    whole = bytearray(pickle.dumps(make_snapshot(LITERAL, 8, UNLIMITED), protocol=4))
    whole[at % len(whole)] = byte
    for content in (bytes(whole), bytes(whole[: at % len(whole)])):
        path.write_bytes(content)
        try:
            load_snapshot(path)
        except DataFileError as error:
            assert "\n" not in str(error)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    """In one line."""
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
        Job(
            "mine",
            (("num_classes", classes),),
            (parse_tensor_spec("3x224x224"),),
            parse_tensor_spec("10"),
            source="torchvision:resnet50",
            steps=7,
        )
    )


@pytest.mark.parametrize("name", ["", "history.jsonl.gz"])
def test_measuring_records_are_read(name: str, records: Path) -> None:
    """Of a folder, or its file of histories, the record of this model at this batch size is taken."""
    found = load_recording(records / name, resnet(), 32)
    assert found.blocks == BLOCKS
    assert found.marks[1:] == (RecordedMark(1, 1, Phase.FORWARD), RecordedMark(2, 1, Phase.BACKWARD))


@pytest.mark.parametrize(("classes", "batch"), [(10, 64), (1000, 32)])
def test_records_of_something_else_are_refused(classes: int, batch: int, records: Path) -> None:
    """Another batch size or another model is no record of this job, and the error says what there is."""
    with pytest.raises(UsageError) as caught:
        load_recording(records, resnet(classes), batch)
    assert str(caught.value) == (
        f"--against {records}: no history of this job at batch {batch}; "
        "it has torchvision:resnet50 at batch 32"
    )
