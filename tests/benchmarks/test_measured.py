"""The records of an H200 and the tables, page and rules that rest on them."""

import json
import lzma
import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks.emulated.rows import Row
from benchmarks.measured.compare import COMPARED
from benchmarks.measured.jobs import PLANNED, Planned, job_of
from benchmarks.measured.report import PAGE, RECORDS, observations, page
from benchmarks.rows import read_rows
from planner.allocator.history import check_history, load_published
from planner.allocator.history.file import load_history
from planner.capture.workspaces.ops import Hold
from planner.capture.workspaces.registry import rule_of
from planner.program.target import Target
from tests.helpers.workspaces import last, meta

WORKERS = 6
CUDA_GRAPHS = "graphs_gpt"  # their pools are not in a history


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked records."""
    folder = tmp_path_factory.mktemp("records")
    with tarfile.open(RECORDS) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("part", range(WORKERS))
def test_the_simulator_follows_each_run_to_its_last_event(records: Path, part: int) -> None:
    """Every block lies at the address that CUDA's allocator recorded on the GPU."""
    paths = sorted(records.rglob("*.history.gz"))
    assert len(paths) == 360
    for path in paths[part::WORKERS]:
        check = check_history(load_history(path))
        assert (path.name, check.difference) == (path.name, None)
        assert check.allocations > 0 and check.segment_events > 0


@pytest.mark.slow
def test_the_simulator_follows_whole_scripts(records: Path) -> None:
    """Trainers, own loops, compiled code, ranks and retries; but for CUDA graphs."""
    paths = sorted((records / "scripts").glob("*.published.gz"))
    assert len(paths) == 13
    agree = {path.name.split(".")[0] for path in paths if _agrees(path)}
    assert agree == {path.name.split(".")[0] for path in paths} - {CUDA_GRAPHS}


def _agrees(path: Path) -> bool:
    return check_history(load_published(path).history).difference is None


def test_the_page_is_what_its_script_writes() -> None:
    """docs/measured.md follows from the tables and records."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_rows_have_the_figures_of_their_observations() -> None:
    """A row is of a job that was planned before it ran, and its recorded peaks are those of NVIDIA's GPU."""
    seen, planned = observations(), {row.number: row for row in read_rows(PLANNED, Planned)}
    rows = read_rows(COMPARED, Row)
    assert len(rows) == 341
    for row in rows:
        run, before = seen[str(row.number)], planned[row.number]
        assert (run["gpu"], run["source"], run["oom"]) == ("NVIDIA H200", "measured", False)
        assert (row.model, row.batch, row.failure) == (before.model, before.batch, "")
        peaks = run["peak_allocated_bytes"], run["peak_reserved_bytes"]
        assert (row.emulated_allocated, row.emulated_reserved) == peaks
        assert (run["job"]["model"], run["batch"]) == (before.model, before.batch)


def test_a_job_is_read_from_its_row() -> None:
    """The options of a row name the optimizer and precision that ran."""
    row = next(row for row in read_rows(PLANNED, Planned) if row.number == -2)
    job = job_of(row, torch="2.11.0")
    assert (job.loop.optimizer, job.loop.precision, job.model.memory_format) == (
        "momentum",
        "amp-fp16",
        "channels_last",
    )
    assert job.environment.torch == "2.11"


def test_the_rule_of_batch_norm_gives_all_sizes_that_cudnn_answered() -> None:
    """In channels last, in the dtypes that torch gives to cuDNN, up to 2**31 elements."""
    answered = json.loads(lzma.decompress((RECORDS.parent / "cudnn.json.xz").read_bytes()))["batch_norm"]
    target = Target.for_capability((9, 0), sm_count=132)
    forward = rule_of(torch.ops.aten.native_batch_norm.default)
    backward = rule_of(torch.ops.aten.native_batch_norm_backward.default)
    assert forward is not None and backward is not None
    held = 0
    for kind, samples, channels, extent, ahead, back in answered:
        if kind == 9 or samples * channels * extent**2 >= 2**31 - 1:
            continue
        dtype = torch.float16 if kind == 2 else torch.float32
        x, weight = last(samples, channels, extent, extent, dtype=dtype), meta(channels)
        args = (x, x, weight, weight, weight, weight, weight, True, 1e-5, [True] * 3)
        assert forward((x, weight, weight, weight, weight, True, 0.1, 1e-5), None, target)[-1] == Hold(ahead)
        assert backward(args, None, target)[-1] == Hold(back)
        held += 1
    assert held == 5514
