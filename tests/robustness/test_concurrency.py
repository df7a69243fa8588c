"""Processes that write at once or are interrupted lose nothing.

`--runs N` sets how often the counted tests run (`make soak`: 1,000 in all); each prints what it counted.
"""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from planner.errors import PlannerError
from planner.hardware.calibration.files import Origins, add_points, key_of, load_folders
from planner.hardware.calibration.model import NoFit, Point
from planner.planning.sweep.results import ResultStore
from planner.planning.sweep.task import Task, TaskResult
from planner.program.events import Phase, PhaseStart, Site, Trace
from planner.program.program import constant_program
from planner.store.cache_dir import CacheDirectory
from tests.helpers.file_readers import FIGURES
from tests.helpers.runs import RUN
from tests.helpers.structs import replace
from tests.helpers.traces import GA102, load_trace, save_trace

# ---- interrupts and other processes: nothing lost, nothing half-written


ORIGINS = Origins("measured", "a", "torch 2.13")


def _write_all(folder: Path, numbers: range, pipe: int) -> None:
    """Write each number into a calibration, a trace, a cache and a folder of results; then report it."""
    small = Trace((PhaseStart(0, Phase.SETUP),), (Site("", "to"),), 2)
    store, task = ResultStore(folder / "sweep", "", print), Task("m", "r", RUN.job, (), {})
    cache = CacheDirectory(folder / "cache", print)
    for number in numbers:
        measured = replace(RUN, batch=number)
        add_points(folder, key_of(measured), [Point(measured, 10**9 + number)], ORIGINS, _no_fit)
        save_trace(small, folder / "t.trace", {"number": number})
        cache.put({"number": number % 3}, [constant_program(small, GA102)], {})
        store.keep(task, TaskResult({str(number): FIGURES}))
        os.write(pipe, f"{number}\n".encode())


def _no_fit(points: object) -> NoFit:
    return NoFit("not requested")


class Reports:
    """The reports of a process, a number in each line."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._output = pipe, b""

    def wait(self, count: int) -> None:
        """Wait until it has reported so many numbers, or has ended."""
        while self._output.count(b"\n") < count and (more := os.read(self._pipe, 4096)):
            self._output += more

    def all(self) -> set[int]:
        """Return all numbers, when it has ended."""
        with os.fdopen(self._pipe, "rb") as file:
            return set(map(int, (self._output + file.read()).split()))


@contextmanager
def forked(folder: Path, numbers: range) -> Iterator[tuple[int, Reports]]:
    """A process that writes; its id, and what it reports."""
    out, pipe = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            _write_all(folder, numbers, pipe)
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(130)
        finally:  # never back into the tests
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.close(pipe)
    yield pid, Reports(out)
    os.waitpid(pid, 0)


def _saved(folder: Path) -> tuple[set[int], int]:
    """Numbers that are in the calibrations and in the results; and how many files could not be read."""
    measured: set[int] = set()
    swept: set[int] = set()
    broken = 0
    try:
        measured = {point.observation.batch for one in load_folders([folder]) for point in one.points}
    except PlannerError:
        broken += 1
    try:
        if (folder / "t.trace").exists():
            load_trace(folder / "t.trace")
    except PlannerError:
        broken += 1
    warned: list[str] = []
    cache = CacheDirectory(folder / "cache", warned.append)
    for number in range(3):
        cache.get({"number": number})
    broken += len(warned)
    for path in (folder / "sweep").glob("*.json"):
        try:
            swept |= set(map(int, json.loads(path.read_text())["cells"]))
        except ValueError:
            broken += 1
    return measured & swept, broken


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path, runs: int) -> None:
    """Several processes write into the same folders at once: all of it is there, and whole."""
    each = max(2, runs // 4)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(forked(tmp_path, range(1 + each * number, 1 + each * (number + 1))))
            for number in range(4)
        ]
        written = set().union(*(reports.all() for _, reports in writers))
    saved, broken = _saved(tmp_path)
    print(f"\nconcurrent: {len(written)} writes by 4 processes, {len(written - saved)} lost, {broken} broken")
    assert written == saved == set(range(1, 4 * each + 1)) and broken == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_processes_leave_nothing_half_written(
    tmp_path: Path, runs: int, number: signal.Signals
) -> None:
    """Processes are stopped while they write: what they reported is there, and everything is whole."""
    chance = random.Random(number)
    total = lost = broken = partial = 0
    for turn in range(runs):
        folder = tmp_path / str(turn // 10)
        with forked(folder, range(1 + 10 * (turn % 10), 11 + 10 * (turn % 10))) as (pid, reports):
            reports.wait(chance.randrange(10))
            time.sleep(chance.random() * 0.02)  # anywhere within the next of its writes
            os.kill(pid, number)
            written = reports.all()
        saved, unreadable = _saved(folder)
        total, lost, broken = total + len(written), lost + len(written - saved), broken + unreadable
        partial += len([*folder.rglob("*.partial")])
    print(f"\n{number.name}: {runs} processes, {total} writes, {lost} lost, {broken} broken")
    assert (lost, broken) == (0, 0) and total > 0
    assert number == signal.SIGKILL or partial == 0
