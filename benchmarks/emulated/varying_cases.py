"""Run a case of samples of many sizes on both sides, over the same sampled batches.

A run that dies of a cap has the peaks up to there; it counts as the same where both sides die in one step.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from msgspec.structs import replace

from benchmarks.emulated.both_sides import Side
from benchmarks.emulated.differential import row_of
from benchmarks.emulated.jobs import DrawnJob
from benchmarks.emulated.probe_client import ROOT
from benchmarks.emulated.rows import ALLOCATOR, EMULATED_FAILS, IDENTICAL, STATIC_FAILS, Row
from planner.allocator import MemoryLimits, parse_alloc_conf
from planner.errors import PlannerError
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.jobs import BatchShape, Job, draw_batches, load_distribution
from planner.planning.varying.plan import open_batches
from planner.planning.varying.process import VaryingProcess
from planner.planning.varying.programs import SizedPrograms
from planner.program import ignore_progress


def compare_varying(job: Job, drawn: DrawnJob, command: Sequence[str], python: str) -> Row:
    """Return the row of a case whose command is a script, a configuration of the allocator and a cap."""
    start = perf_counter()
    script, config, cap_mib = command
    shapes = draw_batches(
        job, load_distribution(job), drawn.batch, 0, job.samples.run_steps * job.loop.accumulate
    )
    emulated, died = _emulated(job, drawn, shapes, script, config, int(cap_mib), python)
    if emulated.failure:
        return row_of(drawn, emulated, Side(), EMULATED_FAILS, start)
    try:
        planned, planned_death = _planned(job, drawn, shapes, config, int(cap_mib))
    except PlannerError as error:
        return row_of(drawn, emulated, Side(failure=str(error)), STATIC_FAILS, start)
    is_same = (emulated.allocated_bytes, emulated.reserved_bytes, died) == (
        planned.allocated_bytes,
        planned.reserved_bytes,
        planned_death,
    )
    place = f"out of memory in step {died}, planned {planned_death}" if died or planned_death else ""
    causes = "; ".join(part for part in (config, f"cap {cap_mib} MiB" if cap_mib != "0" else "") if part)
    return row_of(
        drawn, emulated, planned, IDENTICAL if is_same else ALLOCATOR, start, place=place, what=causes
    )


def _planned(
    job: Job, drawn: DrawnJob, shapes: Sequence[BatchShape], config: str, cap_mib: int
) -> tuple[Side, int | None]:
    device = find_device(drawn.gpu)
    programs = SizedPrograms(job, load_distribution(job), device.target, ignore_progress)
    limits = MemoryLimits(
        capacity_bytes=device.usable.value - device.context.value, total_bytes=device.usable.value
    )
    if config:
        limits = replace(limits, config=parse_alloc_conf(config))
    if cap_mib:
        limits = replace(limits, limit_bytes=cap_mib * MIB)
    process = VaryingProcess(open_batches(job, programs), limits, shapes[0])
    for shape in shapes:
        if not process.step([shape]):
            break
    run, died = process.replay(drawn.batch), None if process.is_alive else process.steps
    return Side(run.peak_allocated_bytes, run.peak_reserved_bytes, died is not None, run.retries), died


def _emulated(
    job: Job,
    drawn: DrawnJob,
    shapes: Sequence[BatchShape],
    script: str,
    config: str,
    cap_mib: int,
    python: str,
) -> tuple[Side, int | None]:
    with TemporaryDirectory() as folder:
        batches = Path(folder) / "batches.json"
        what: dict[str, Any] = {
            "model": job.model.name.partition(":")[2],
            "cap_mib": cap_mib,
            "batches": shapes,
        }
        what |= {"optimizer": job.loop.optimizer.value, "precision": job.loop.precision.value}
        batches.write_text(json.dumps(what))
        command = [sys.executable, "-m", "planner", "run", "--gpu", drawn.gpu, "--json", "--", python]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if config:
            environment["PYTORCH_ALLOC_CONF"] = config
        done = subprocess.run(
            [*command, script, str(batches)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
    figures = re.search(r"PEAKS (\d+) (\d+) (\d+) (\d+)", done.stderr)
    if not done.stdout.strip() or figures is None:
        return Side(failure=done.stderr[-400:]), None
    versions = json.loads(done.stdout)["versions"]
    allocated, reserved, retries, died = map(int, figures.groups())
    text = f"torch {versions['torch']}, cudnn {versions['cudnn']}"
    return Side(allocated, reserved, died > 0, retries, text), died or None
