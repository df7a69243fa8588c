"""Run one case on both sides."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.emulated.both_sides import Emulator, Side, plan_statically
from benchmarks.emulated.capabilities.case import Case
from benchmarks.emulated.differential import by_peaks, compare_job, row_of, with_causes
from benchmarks.emulated.probe_client import ROOT
from benchmarks.emulated.rows import EMULATED_FAILS, STATIC_FAILS, Row
from benchmarks.emulated.varying_cases import compare_varying
from planner.allocator.history import load_snapshot, recording_of
from planner.api.request.request import make_job
from planner.errors import PlannerError
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.jobs import size_ranges


def compare_case(case: Case, emulator: Emulator, libraries: Mapping[str, str]) -> Row:
    """Run one case both ways; `libraries` are options of the static side."""
    if not case.command:
        return compare_job(case.job, emulator, libraries)
    start, drawn = perf_counter(), case.job
    device = find_device(drawn.gpu)
    try:
        job, _, _ = make_job(drawn.model, {**drawn.options, **libraries})  # type: ignore[typeddict-item]
    except PlannerError as error:
        return row_of(drawn, Side(), Side(failure=f"{type(error).__name__}: {error}"), STATIC_FAILS, start)
    if size_ranges(job):
        return compare_varying(job, drawn, case.command, emulator.python)
    with TemporaryDirectory() as folder:
        snapshot = Path(folder) / "snapshot.pickle"
        emulated = run_command(case, emulator.python, snapshot)
        if emulated.failure:
            return row_of(drawn, emulated, Side(), EMULATED_FAILS, start)
        planned, trace = plan_statically(job, drawn.batch, device)
        if trace is None:
            return row_of(drawn, emulated, planned, STATIC_FAILS, start)
        if round(planned.allocated_bytes / MIB, 3) == round(emulated.allocated_bytes / MIB, 3):
            emulated = replace(emulated, allocated_bytes=planned.allocated_bytes)  # as far as it was told
        if not snapshot.is_file():
            return by_peaks(drawn, emulated, planned, trace, "", start)
        recording = recording_of(load_snapshot(snapshot), "emulated")
        return with_causes(drawn, emulated, planned, trace, recording, "", start)


def run_command(case: Case, python: str, snapshot: Path) -> Side:
    """Run a case's command under `planner run`; `snapshot` gets the history of its rank if largest."""
    command = [sys.executable, "-m", "planner", "run", "--gpu", case.job.gpu, "--json"]
    command += ["--gpus", str(case.ranks)]
    command += ["--stop-after", str(case.stop_after)] if case.stop_after else []
    command += ["--snapshot", str(snapshot), "--", python]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *case.command], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    if not done.stdout.strip():
        return Side(failure=done.stderr[-400:])
    result = json.loads(done.stdout)
    rank = result["ranks"][case.rank]
    if rank["peak_reserved_mib"] < max(other["peak_reserved_mib"] for other in result["ranks"]):
        snapshot.unlink(missing_ok=True)  # of another rank
    if result["exit_code"] or (case.stop_after and not rank["step_count"]):
        return Side(failure=f"the command ended with {result['exit_code']}: {done.stderr[-300:]}")
    versions = result["versions"]
    return Side(
        round(rank["peak_allocated_mib"] * MIB),
        round(rank["peak_reserved_mib"] * MIB),
        rank["failure"] is not None,
        rank["retries"],
        f"torch {versions['torch']}, cudnn {versions['cudnn']}",
    )
