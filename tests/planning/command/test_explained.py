"""Attribution of an emulated run: its text, JSON and page, on a history made by hand."""

import json
import re
from pathlib import Path

import pytest

from planner.allocator.history.history import HistoryEvent
from planner.emulator.record import EmulatedRun, GpuPeaks, GpuRecord, OutOfMemory, StepPeaks
from planner.errors import DataFileError
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.planning.attribution import DisplayLimits
from planner.planning.command.explained import explain_run
from planner.report.commands.run import run_document, run_summary, run_to_json
from planner.report.page.page import page_data, page_html
from planner.report.plain import render_plain
from planner.report.plots.timeline import draw_timeline
from tests.helpers.recorded import MOVES, TWO_STEPS
from tests.helpers.structs import replace

PEAKS = GpuPeaks(5 * MIB, 6 * MIB, 300 * MIB)
VERSIONS = (("torch", "2.13.0"),)
RECORD = GpuRecord(0, 7, 0, 0, (StepPeaks(1, 1, PEAKS),), PEAKS, 0, 0, None, VERSIONS, 1, was_stopped=False)
DEVICE = find_device("L4")
RUN = EmulatedRun(DEVICE.name, 1, ("python", "src/train.py"), 0, (RECORD,), 1.0, ("emulated",), (TWO_STEPS,))
LOST = OutOfMemory(2, "", "a", "train.py:9", 8 * MIB, was_raised=True)


def test_the_process_is_the_sum_of_its_parts() -> None:
    """Context, categories at the allocated peak, and what is reserved beyond it."""
    explained = explain_run(RUN, DEVICE)
    assert sum(explained.parts.values()) == PEAKS.process_bytes
    assert {name: size for name, size in explained.parts.items() if size} == {
        "context": 294 * MIB,
        "parameters": MIB,
        "gradients": MIB,
        "inputs": MIB,
        "activations": 2 * MIB,
        "fragmentation": MIB,
    }
    assert not [note for note in explained.notes if note.startswith("peak")]


def test_text_has_the_peak_by_category_and_module() -> None:
    """The text has the tables of `planner explain`, between the steps and the versions."""
    text = render_plain(run_document(RUN, explain_run(RUN, DEVICE)))
    assert re.search(r"^Peak allocated: 5\.0 MiB in step 1, backward pass, module a, autograd$", text, re.M)
    assert re.search(r"^  context +294\.0 +98\.0%$", text, re.M)
    assert re.search(r"^  a +3\.0 +60\.0%", text, re.M)
    assert "Largest of the 5 blocks in use at the peak" in text
    assert max(map(len, text.splitlines())) <= 100


def test_json_has_the_keys_of_explain() -> None:
    """Sums are in whole bytes; the run's own keys stay as they are."""
    fields = run_to_json(RUN, explain_run(RUN, DEVICE))
    assert sum(fields["categories"].values()) == fields["peak"]["allocated_bytes"] == 5 * MIB
    assert fields["modules"]["size_bytes"] == 5 * MIB
    assert fields["steps"] == run_to_json(RUN)["steps"]
    assert fields.keys() - run_to_json(RUN).keys() == {
        *("peak", "categories", "modules", "tensors", "blocks", "fragmentation", "phases")
    }


def test_page_says_that_it_is_an_emulated_run() -> None:
    """Title, command, GPU and versions; the figures are the replay's."""
    explained = explain_run(RUN, DEVICE)
    summary = run_summary(explained)
    page = page_html(summary, explained.explanation, explained.trace, DisplayLimits(), None)
    assert f"<h1>train.py on {DEVICE.name} (emulated)</h1>" in page
    assert "Emulated run: python src/train.py; exit code 0; torch 2.13.0" in page
    data = json.loads(json.dumps(page_data(summary, explained.explanation, explained.trace, None)))
    assert (data["emulated"], data["process_bytes"]) == (True, 300 * MIB)
    assert data["peak_allocated_bytes"] == PEAKS.allocated_bytes


def test_a_run_that_ends_out_of_memory_is_shown_up_to_there() -> None:
    """Frees at the end of such a run are no part of the picture."""
    end = [HistoryEvent("oom", 0, 8 * MIB, 0)]
    end += [
        HistoryEvent(action, one.address, MIB)
        for one in MOVES[-2:]
        for action in ("free_requested", "free_completed")
    ]
    history = replace(TWO_STEPS, events=(*MOVES, *end))
    record = replace(RECORD, failure=LOST)
    explained = explain_run(replace(RUN, exit_code=1, records=(record,), histories=(history,)), DEVICE)
    assert explained.trace == explain_run(RUN, DEVICE).trace
    summary = run_summary(explained)
    assert summary.answer == "The command runs out of memory"
    assert "train.py:9, no room for 8.0 MiB" in summary.entries[0].text


def test_a_difference_to_the_run_is_noted() -> None:
    """The report names both peaks if the simulator replays another one than the run had."""
    other = replace(RECORD, steps=(), after_steps=replace(PEAKS, reserved_bytes=22 * MIB))
    explained = explain_run(replace(RUN, records=(other,)), DEVICE)
    assert explained.notes[-1] == (
        "peak reserved: 6.0 MiB by the replay of the history that is shown, 22.0 in the run"
    )


@pytest.mark.parametrize(
    ("histories", "words"),
    [
        ((), "process 7 left no history of its allocator"),
        ((replace(TWO_STEPS, is_whole=False),), "does not begin with the process; try --stop-after 3"),
    ],
)
def test_a_history_that_holds_too_little_is_refused(histories: tuple[()], words: str) -> None:
    """One line names what is missing and what to do."""
    with pytest.raises(DataFileError, match=words):
        explain_run(replace(RUN, histories=histories), DEVICE)


def test_picture(tmp_path: Path) -> None:
    """The title names script and GPU, and that it is emulated."""
    import matplotlib

    explained = explain_run(RUN, DEVICE)
    path = tmp_path / "x.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_timeline(explained.explanation, run_summary(explained).caption, path)
    assert f"train.py on {DEVICE.name} (emulated)" in path.read_text(encoding="utf-8")
