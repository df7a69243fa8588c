"""Records of processes, their sums, and the report of `planner run`."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from planner.emulator.child.steps import MOST_ROWS, Steps
from planner.emulator.launch import RunOptions, run_emulated
from planner.emulator.record import (
    EmulatedRun,
    GpuPeaks,
    GpuRecord,
    OtherProcess,
    OutOfMemory,
    StepPeaks,
    read_records,
)
from planner.errors import DataFileError, ModelError, UnsavedError
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.planning.command.largest_batch import CommandPlan
from planner.planning.search.boundary import Search
from planner.program.events import Outcome
from planner.report.commands.run import command_plan_document, command_plan_to_json, run_document, run_to_json
from planner.report.plain import render_plain

VERSIONS = (("torch", "2.13.0"), ("cuda", "13.0"), ("cudnn", "9.20.0"))


def peaks(allocated: int, reserved: int, process: int) -> GpuPeaks:
    """Return peaks given in MiB."""
    return GpuPeaks(allocated * MIB, reserved * MIB, process * MIB)


def record(
    rank: int = 0, failure: OutOfMemory | None = None, retries: int = 0, process: int = 400
) -> GpuRecord:
    """Return the record of a process that took three steps."""
    steps = (StepPeaks(1, 1, peaks(100, 200, 300)), StepPeaks(2, 3, peaks(150, 220, process)))
    after = peaks(50, 220, 320)
    return GpuRecord(rank, 7, rank, rank, steps, after, retries, 0, failure, VERSIONS, 3, was_stopped=False)


def run(*records: GpuRecord, code: int = 0) -> EmulatedRun:
    """Return a run with these records."""
    return EmulatedRun(
        "L4", len(records), ("python", "train.py", "--lr", "1"), code, records, 1.5, ("emulated",)
    )


RAISED = OutOfMemory(2, "", "body.0", "train.py:7", 614 * MIB, was_raised=True)


def test_the_peaks_of_a_process_are_those_of_its_steps_and_of_what_follows() -> None:
    """An evaluation after the last step counts too."""
    assert record().peak == peaks(150, 220, 400)


def test_the_rank_that_takes_most_stands_for_the_run() -> None:
    """All ranks have to fit."""
    assert run(record(0), record(1, process=500)).largest.rank == 1


def ended(monkeypatch: pytest.MonkeyPatch, code: int, *records: GpuRecord) -> None:
    """Let each command end with this code and leave these records, and no history of an allocator."""

    def leave(command: object, environment: dict[str, str], *others: object) -> int:
        for one in records:
            path = Path(environment["PLANNER_EMULATED_RECORDS"]) / f"{one.rank}-{one.pid}.json"
            path.write_bytes(msgspec.json.encode([one]))
        return code

    monkeypatch.setattr("planner.emulator.launch._run", leave)


def test_a_killed_process_leaves_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one rank runs out of memory, its launcher kills the others, of which one may be the largest."""
    options = RunOptions(find_device("L4"), snapshot=tmp_path / "history.pickle")
    ended(monkeypatch, 1, record(0), record(1, RAISED))
    with pytest.raises(UnsavedError, match="not written: process 7 left no history") as error:
        run_emulated(["train"], options, tmp_path, print)
    assert isinstance(error.value.result, EmulatedRun) and error.value.result.failure == RAISED


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (-9, "it was ended by SIGKILL"),
        (137, "it ended with exit code 137, as a shell reports SIGKILL"),
        (7, "it ended with exit code 7"),
        (250, "it ended with exit code 250"),
    ],
)
def test_the_end_of_a_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, ending: str
) -> None:
    """A process that was killed has a signal; a shell adds 128 to its number."""
    ended(monkeypatch, code, replace(record(0), after_steps=None))
    with pytest.raises(ModelError) as error:
        run_emulated(["train"], RunOptions(find_device("L4")), tmp_path, print)
    assert str(error.value) == f"train: {ending}, and not for want of GPU memory"


def test_a_crash_after_the_work_stands_beside_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads may abort a process while its interpreter is finalized; a shell calls it exit code 134."""
    options = RunOptions(find_device("L4"))
    for code in (-6, 134):
        ended(monkeypatch, code, record(0))
        done = run_emulated(["train"], options, tmp_path, print)
        assert (done.outcome, done.crash, done.exit_code) == (Outcome.FITS, "SIGABRT", code)
    ended(monkeypatch, 1, record(0), record(1))
    assert run_emulated(["torchrun"], options, tmp_path, print).crash == "exit code 1 of its launcher"
    for code, one in ((1, record(0)), (-6, replace(record(0), raised=True)), (200, record(0))):
        ended(monkeypatch, code, one)
        with pytest.raises(ModelError, match="and not for want of GPU memory"):
            run_emulated(["train"], options, tmp_path, print)
    text = render_plain(run_document(run(record(), code=-6)))
    assert "Died at exit:   SIGABRT, after the script had ended and its record was whole" in text


def test_a_command_that_survives_a_refused_allocation_fits() -> None:
    """cuDNN goes on with another plan, and a batch-size finder with a smaller batch."""
    assert run(record(failure=RAISED)).outcome is Outcome.FITS


def test_an_error_that_the_script_caught_is_named() -> None:
    """The command fits by another way than it was asked to go: it is no plain yes."""
    caught = replace(RAISED, was_raised=False, reached_script=True)
    text = render_plain(run_document(run(record(failure=caught)))).splitlines()
    assert text[:2] == [
        "Fits:           yes, but the script met an out-of-memory error, and caught it",
        "Caught:         before optimizer step 2 ended, module body.0, train.py:7, no room for 614.0 MiB",
    ]


def test_a_command_that_memory_ended_does_not_fit() -> None:
    """The failure that was raised is the one that is reported."""
    survived = OutOfMemory(1, "", "", "", MIB, was_raised=False)
    ended = run(record(0, survived), record(1, RAISED), code=1)
    assert (ended.outcome, ended.failure) == (Outcome.DOES_NOT_FIT, RAISED)


def test_retries_of_any_rank_are_retries_of_the_run() -> None:
    """One rank that waits for the driver makes the others wait."""
    assert run(record(), record(1, retries=2)).outcome is Outcome.FITS_WITH_RETRIES


def test_text() -> None:
    """The report as a person reads it."""
    assert render_plain(run_document(run(record(failure=RAISED), code=1))).splitlines() == [
        "Fits:           no: out of memory",
        "Fails:          before optimizer step 2 ended, module body.0, train.py:7, no room for 614.0 MiB",
        "GPU:            L4 (emulated)",
        "Command:        python train.py --lr 1; exit code 1",
        "",
        "Peak                           allocated    reserved  nvidia-smi MiB",
        "  whole run                        150.0       220.0           400.0",
        "",
        "Optimizer step                 allocated    reserved  nvidia-smi MiB",
        "  1                                100.0       200.0           300.0",
        "  2 to 3                           150.0       220.0           400.0",
        "  after the last step               50.0       220.0           320.0",
        "",
        "Versions:       torch 2.13.0, cuda 13.0, cudnn 9.20.0",
        "Assumed",
        "  - emulated",
        "Took 1.5 s",
    ]


def test_json() -> None:
    """The keys are a contract with other programs; figures are those of the rank that takes most."""
    answer = run_to_json(run(record(0), record(1, process=500)))
    ranks = answer.pop("ranks")
    assert [(one["rank"], one["process_mib"]) for one in ranks] == [(0, 400.0), (1, 500.0)]
    assert answer == {
        "schema": 1,
        "emulated": True,
        "gpu": "L4",
        "gpus": 2,
        "command": ["python", "train.py", "--lr", "1"],
        "exit_code": 0,
        "fits": "yes",
        "peak_allocated_mib": 150.0,
        "peak_reserved_mib": 220.0,
        "process_mib": 500.0,
        "retries": 0,
        "steps": [
            {
                "first": 1,
                "last": 1,
                "peak_allocated_mib": 100.0,
                "peak_reserved_mib": 200.0,
                "process_mib": 300.0,
            },
            {
                "first": 2,
                "last": 3,
                "peak_allocated_mib": 150.0,
                "peak_reserved_mib": 220.0,
                "process_mib": 500.0,
            },
        ],
        "failure": None,
        "crash": None,
        "shared_gpus": [],
        "versions": {"torch": "2.13.0", "cuda": "13.0", "cudnn": "9.20.0"},
        "assumptions": ["emulated"],
        "seconds": 1.5,
    }


def test_a_gpu_that_two_ranks_share_is_named() -> None:
    """With the most that both have at the same time, which may be less than their peaks together."""
    stray = replace(record(1, process=500), gpu_index=0, first_line="train.py:7")
    shared = replace(run(record(0), stray, record(1)), gpu_peaks=(850 * MIB, 400 * MIB))
    text = " ".join(render_plain(run_document(shared)).split())
    assert "ranks 0 and 1 share GPU 0: 850.0 MiB at the same time" in text and "share GPU 1" not in text
    since = "rank 1 also has memory on another GPU, and on this one since train.py:7: look for torch.load"
    assert since in text
    expected = [{"gpu": 0, "ranks": [0, 1], "process_mib": 850.0}]
    assert run_to_json(shared)["shared_gpus"] == expected


def test_processes_that_share_their_only_gpu_are_no_strays() -> None:
    """Two ranks on one GPU, as a machine with one GPU has them, get no hint."""
    shared = replace(run(record(0), replace(record(1), gpu_index=0)), gpu_peaks=(850 * MIB,))
    assert "also ha" not in render_plain(run_document(shared))


def test_a_failure_names_who_else_is_on_the_gpu() -> None:
    """A rank that was put on the wrong GPU takes the room of its own."""
    failure = replace(RAISED, others=(OtherProcess(1, 300 * MIB),))
    failed = run(record(0, failure), code=1)
    text = " ".join(render_plain(run_document(failed)).split())
    assert "no room for 614.0 MiB, next to 300.0 MiB of rank 1" in text
    assert run_to_json(failed)["failure"]["others"] == [{"rank": 1, "process_mib": 300.0}]


WRITTEN: dict[str, Any] = {
    "rank": 1,
    "pid": 7,
    "device": 0,
    "gpu_index": 1,
    "steps": [
        {"first": 1, "last": 2, "peaks": {"allocated_bytes": 1, "reserved_bytes": 2, "process_bytes": 3}}
    ],
    "after_steps": None,
    "retries": 4,
    "pinned_bytes": 5,
    "failure": None,
    "versions": VERSIONS,
    "step_count": 2,
    "was_stopped": False,
}


def test_a_record_is_read_for_each_gpu_of_the_process(tmp_path: Path) -> None:
    """A process that was killed left what it had written at its last step."""
    (tmp_path / "1-7.json").write_text(json.dumps([WRITTEN]), encoding="utf-8")
    (single,) = read_records(tmp_path)
    steps = (StepPeaks(1, 2, GpuPeaks(1, 2, 3)),)
    assert single == GpuRecord(1, 7, 0, 1, steps, None, 4, 5, None, VERSIONS, 2, was_stopped=False)


@pytest.mark.parametrize("text", ["", "{}", json.dumps([{**WRITTEN, "steps": [{}]}])])
def test_a_broken_record_is_refused(tmp_path: Path, text: str) -> None:
    """The message names the file."""
    (tmp_path / "0-7.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataFileError, match=r"0-7\.json: not a record"):
        read_records(tmp_path)


def plan(replayed: tuple[int, ...] = (32, 40), notes: tuple[str, ...] = ()) -> CommandPlan:
    """Return a search whose answer is 40 samples, 44 with retries."""
    search = Search(44, 40, 45, ((40, Outcome.FITS), (41, Outcome.FITS_WITH_RETRIES)))
    confirmed = (
        (40, Outcome.FITS),
        (41, Outcome.FITS_WITH_RETRIES),
        (44, Outcome.FITS_WITH_RETRIES),
        (45, Outcome.DOES_NOT_FIT),
    )
    failed = run(record(failure=RAISED), code=1)
    return CommandPlan(
        ("train", "{batch}"), "L4", 1, 0.99, search, run(record(retries=1)), run(record()), failed, replayed,
        confirmed, "the first 3 optimizer steps: nothing after them", notes, 6, 30.0,
    )  # fmt: skip


def test_text_of_a_search() -> None:
    """The text states the way to the answer, and the runs that confirm it."""
    assert render_plain(command_plan_document(plan(notes=("a note",)))).splitlines()[:9] == [
        "Largest batch:  40 at confidence 0.99, without retries",
        "With retries:   44: cached memory is released to make room",
        "Covered:        the first 3 optimizer steps: nothing after them",
        "Found by:       replay of the allocator's history at batches 32 and 40; confirmed by runs on the",
        "                emulated GPU at batches 40, 41, 44 and 45",
        "Note:           a note",
        "GPU:            L4 (emulated)",
        "Command:        train '{batch}'",
        "",
    ]


def test_text_of_a_search_by_runs_alone() -> None:
    """If histories do not align, all is runs."""
    (line,) = [
        one
        for one in render_plain(command_plan_document(plan(replayed=()))).splitlines()
        if one.startswith("Found by")
    ]
    assert line == "Found by:       runs on the emulated GPU at batches 40, 41, 44 and 45"


def test_json_of_a_search() -> None:
    """Replayed batch sizes and runs stand apart."""
    answer = command_plan_to_json(plan())
    assert (answer["max_batch"], answer["comfortable_batch"], answer["answer_batch"]) == (44, 40, 40)
    assert (answer["replayed"], answer["notes"], answer["runs"]) == ([32, 40], [], 6)
    assert answer["covered"] == "the first 3 optimizer steps: nothing after them"
    assert answer["confirmed"] == [[40, "yes"], [41, "with_retries"], [44, "with_retries"], [45, "no"]]


def test_the_record_of_a_long_run_is_bounded() -> None:
    """Steps that all differ fill a number of rows; later ones share the last row and its largest peaks."""
    steps, kept = Steps(), []
    for step in range(1, 3 * MOST_ROWS + 1):
        steps.add(step, {0: {"allocated_bytes": step % 7, "reserved_bytes": step % 5}})
        kept.append(len(steps.rows))
    assert max(kept) == MOST_ROWS
    last = steps.of(0)[-1]
    assert (last["first"], last["last"], steps.merged_from) == (MOST_ROWS, 3 * MOST_ROWS, MOST_ROWS)
    assert last["peaks"] == {"allocated_bytes": 6, "reserved_bytes": 4}


def test_equal_steps_are_one_row() -> None:
    """A run of any number of equal steps has one row and merges nothing."""
    steps = Steps()
    for step in range(1, 3 * MOST_ROWS + 1):
        steps.add(step, {0: {"allocated_bytes": 1}})
    assert steps.of(0) == [{"first": 1, "last": 3 * MOST_ROWS, "peaks": {"allocated_bytes": 1}}]
    assert steps.merged_from is None


def test_merged_steps_are_named() -> None:
    """One row for many steps that differ is not taken for steps with the same peaks."""
    long = run(replace(record(), merged_from=1000))
    assert "from step 1,000 on, one row has the largest peaks of all steps" in render_plain(
        run_document(long)
    )
    assert run_to_json(long)["ranks"][0]["merged_from"] == 1000
