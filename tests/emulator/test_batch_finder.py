"""Histories made by hand become traces, lines through them, and an answer that runs confirm."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner.allocator.blocks import Block
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MemoryLimits
from planner.allocator.history.history import HistoryEvent
from planner.emulator.history import ProcessHistory, StepEnd, trace_of
from planner.emulator.launch import RunOptions
from planner.emulator.record import EmulatedRun, GpuPeaks, GpuRecord, OutOfMemory, StepPeaks
from planner.hardware.device import MIB, Device, SourcedBytes, generic_device
from planner.planning.command.batch_finder import BatchFinder
from planner.planning.command.by_runs import search_whole
from planner.planning.command.command_runs import CommandRuns
from planner.planning.command.fit import CommandFit, fit_runs, limits_of
from planner.program import LARGEST_BATCH
from planner.program.events import Alloc, Category, Free, Outcome, Phase, PhaseStart, Site
from planner.program.extrapolation.fit import Affine, rounded_affine
from tests.helpers.structs import replace

SITES = (Site("train.py:1", "forward"),)
Move = tuple[str, str, int]  # a (allocate), t (try to allocate), f (free) or s (step ends), a name, bytes
Job = Callable[[int], Iterator[Move]]


def training(batch: int, steps: int = 3) -> Iterator[Move]:
    """Yield the moves of a model of 100 MiB that holds 10 MiB a sample, with scratch that comes and goes."""
    yield "a", "weights", 100 * MIB
    for step in range(steps):
        for layer in range(5):
            yield "a", f"activation {step} {layer}", 2 * MIB * batch
            yield "a", "scratch", 3 * MIB + 1000 * batch + batch % 3 * 16
            yield "f", "scratch", 0
        for layer in range(4, -1, -1):
            yield "f", f"activation {step} {layer}", 0
        yield "s", "", 0


class HandRuns(CommandRuns):
    """Runs of a job on the simulator of the allocator, in place of torch's own."""

    def __init__(self, job: Job, device: Device) -> None:
        super().__init__((), RunOptions(device, stop_after=3), Path(), print)
        self._job = job

    def run(self, batch: int, options: RunOptions, where: str) -> EmulatedRun:
        """Run the job on the GPU, or with memory to spare."""
        is_on_gpu = options is self.options
        room = self.device.usable.value - self.device.context.value if is_on_gpu else None
        return run_job(self._job, batch, room)


def run_job(job: Job, batch: int, capacity_bytes: int | None) -> EmulatedRun:
    """Return what the recorder would write of a job at a batch size."""
    allocator = CachingAllocator(MemoryLimits(capacity_bytes))
    live: dict[str, Block] = {}
    events: list[HistoryEvent] = []
    ends: list[StepEnd] = []
    counts = {"a": 0, "f": 0}
    failure = None
    for action, name, size in job(batch):
        if action == "s":
            ends.append(StepEnd(counts["a"], counts["f"], len(ends) + 1))
            continue
        if action == "f" and name not in live:
            continue
        if action == "f":
            counts["f"] += 1
            block = live.pop(name)
            actions = ("free_requested", "free_completed")
            events += [HistoryEvent(action, block.address, block.size_bytes) for action in actions]
            allocator.free(block)
            continue
        served = allocator.malloc(size)
        if served is None and action == "t":
            continue
        if served is None:
            failure = OutOfMemory(len(ends) + 1, "", "", "", size, was_raised=True)
            break
        counts["a"] += 1
        live[name] = served
        events.append(HistoryEvent("alloc", served.address, size, 0))
    peaks = GpuPeaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, 0)
    record = GpuRecord(0, 1, 0, 0, (), peaks, allocator.retries, 0, failure, (), len(ends), was_stopped=False)
    history = ProcessHistory(0, 1, 0, "", 1.0, True, tuple(events), SITES, tuple(ends))
    code = 0 if failure is None else 1
    return EmulatedRun("GPU", 1, ("train",), code, (record,), 0.0, (), (history,))


def gpu(mib: int) -> Device:
    """Return a GPU that leaves so much to the allocator."""
    device = generic_device(mib)
    nothing = SourcedBytes(0, "none")
    return replace(device, context=nothing, usable=SourcedBytes(mib * MIB, "all"))


def test_a_history_becomes_a_trace() -> None:
    """Blocks freed before anything else happens are scratch; steps end where the counts change."""
    events = [
        HistoryEvent("alloc", 512, 100, 0),
        HistoryEvent("alloc", 1024, 200, 0),
        HistoryEvent("free_requested", 1024, 200, -1),
        HistoryEvent("free_completed", 1024, 200, -1),
        HistoryEvent("alloc", 1024, 300, 0),
        HistoryEvent("free_requested", 512, 100, -1),
        HistoryEvent("free_completed", 512, 100, -1),
    ]
    history = ProcessHistory(0, 1, 0, "", 1.0, True, tuple(events), SITES, (StepEnd(2, 1, 1),))
    assert trace_of(history, 7).events == (
        PhaseStart(1, Phase.FORWARD),
        Alloc(0, 100, Category.TEMPORARY, 0),
        Alloc(1, 200, Category.WORKSPACE, 0),
        Free(1),
        PhaseStart(2, Phase.FORWARD),
        Alloc(2, 300, Category.TEMPORARY, 0),
        Free(0),
    )


def test_the_room_of_a_process_is_its_own() -> None:
    """Of two processes of one rank, what lies outside of its allocator bounds the second alone."""
    run = run_job(training, 8, None)
    first, history = run.records[0], replace(run.histories[0], pid=2)
    outside = GpuPeaks(0, 0, 64 * MIB)
    second = replace(first, pid=2, steps=(StepPeaks(1, 1, outside),), after_steps=None)
    both = replace(run, records=(first, second), histories=(run.histories[0], history))
    rooms = [limits_of(one, both, gpu(1000)).capacity_bytes for one in both.histories]
    assert rooms == [1000 * MIB, (1000 - 64) * MIB]


def test_a_history_that_began_late_is_refused() -> None:
    """Blocks that were there before are not known."""
    history = ProcessHistory(0, 1, 0, "", 1.0, False, (), SITES, ())
    with pytest.raises(ValueError, match="does not begin with the process"):
        trace_of(history, 1)


def test_the_line_of_scratch_passes_nearest_to_the_smaller_batch() -> None:
    """A few bytes that come and go keep no library's workspace from growing with the batch."""
    assert rounded_affine(1016, 2000, 10, 20) == Affine(40, 98)


@pytest.mark.parametrize("mib", [700, 1500, 4096, 40000])
def test_the_answer_is_that_of_runs_and_takes_few(mib: int) -> None:
    """The answer fits and its successor does not, with and without retries; each is a run."""
    runs = HandRuns(training, gpu(mib))
    finder = BatchFinder(runs, 1)
    plan = finder.find()
    assert [runs.outcome(plan.comfortable), runs.outcome(plan.comfortable + 1)] == [
        Outcome.FITS,
        runs.on_gpu[plan.comfortable + 1].outcome,
    ]
    assert runs.on_gpu[plan.comfortable + 1].outcome is not Outcome.FITS
    assert runs.on_gpu[plan.largest].outcome is not Outcome.DOES_NOT_FIT
    assert runs.on_gpu[plan.largest + 1].outcome is Outcome.DOES_NOT_FIT
    assert (finder.fit is not None, finder.notes, runs.count <= 7) == (True, [], True)


def test_only_multiples_are_run() -> None:
    """A script may take no other batch size."""
    runs = HandRuns(training, gpu(4096))
    plan = BatchFinder(runs, 24).find()
    ran = {*runs.on_gpu, *runs.with_spare}
    assert all(batch % 24 == 0 for batch in ran)
    assert runs.on_gpu[plan.largest + 24].outcome is Outcome.DOES_NOT_FIT


def test_a_data_set_smaller_than_the_batch_is_noted() -> None:
    """Memory does not change with the batch size any more; one line notes it."""
    runs = HandRuns(lambda batch: training(min(batch, 40)), gpu(4096))
    finder = BatchFinder(runs, 1)
    plan = finder.find()
    assert plan.largest == LARGEST_BATCH
    (note,) = finder.notes
    assert note.endswith("the command's batches do not grow beyond, as where its data set is smaller")


def test_batches_that_leave_no_step_are_not_looked_at() -> None:
    """A loader that drops its last batch has none where the data set is smaller."""
    runs = HandRuns(lambda batch: training(batch, steps=3 if batch <= 50 else 0), gpu(4096))
    finder = BatchFinder(runs, 1)
    assert (finder.find().largest, len(finder.notes)) == (50, 1), finder.notes
    assert finder.notes[0].startswith("from batch 51 on the command takes no optimizer step")


def test_fewer_steps_at_a_larger_batch_are_enough() -> None:
    """An epoch of few batches ends early; the steps that both have are aligned."""
    job = HandRuns(lambda batch: training(batch, steps=3 if batch <= 60 else 2), gpu(4096))
    fitted = fit_runs({32: job.unbounded(32), 80: job.unbounded(80)}, 80, job.device)
    assert isinstance(fitted, CommandFit)
    marks = [event for event in fitted.ranks[0].program.events if isinstance(event, PhaseStart)]
    assert marks[-1] == PhaseStart(2, Phase.FORWARD)


def test_histories_that_do_not_align_leave_it_to_runs() -> None:
    """If values decide how much is requested, runs alone answer, and a line notes it."""

    def job(batch: int) -> Iterator[Move]:
        for move in training(batch):
            yield move
            if move[1] == "weights":
                for number in range(batch // 3):
                    yield "a", f"chosen {number}", MIB

    runs = HandRuns(job, gpu(2048))
    finder = BatchFinder(runs, 1)
    plan = finder.find()
    assert runs.on_gpu[plan.largest + 1].outcome is Outcome.DOES_NOT_FIT
    assert (finder.fit, len(finder.notes)) == (None, 1)
    assert finder.notes[0].startswith("found by runs alone, since histories cannot be replayed: block")


def test_nothing_fits() -> None:
    """A run shows that not even one sample fits."""
    runs = HandRuns(training, gpu(104))
    plan = BatchFinder(runs, 1).find()
    assert (plan.largest, runs.on_gpu[1].outcome) == (0, Outcome.DOES_NOT_FIT)


@pytest.mark.parametrize("mib", [700, 1500, 4096, 40000])
def test_workspaces_that_memory_refuses_are_left_to_runs(mib: int) -> None:
    """A library that does with less fits where a replay of its history does not; few runs find how far."""

    def job(batch: int) -> Iterator[Move]:
        for action, name, size in training(batch):
            yield (
                ("t", name, size + 8 * MIB * batch)
                if (action, name) == ("a", "scratch")
                else (action, name, size)
            )

    runs = HandRuns(job, gpu(mib))
    finder = BatchFinder(runs, 1)
    plan = finder.find()
    assert runs.count <= 10
    assert runs.on_gpu[plan.comfortable].outcome is Outcome.FITS
    assert runs.on_gpu[plan.comfortable + 1].outcome is Outcome.FITS_WITH_RETRIES
    assert runs.on_gpu[plan.largest].outcome is Outcome.FITS_WITH_RETRIES
    assert runs.on_gpu[plan.largest + 1].outcome is Outcome.DOES_NOT_FIT
    assert (finder.fit is not None, len(finder.notes)) == (True, 1)
    assert finder.notes[0].startswith("the largest batch with retries is found by runs alone: at batch ")


def test_workspaces_that_jump_with_the_batch_are_left_to_runs() -> None:
    """If no line holds for what a library requests, runs bracket both answers."""

    def job(batch: int) -> Iterator[Move]:
        for action, name, size in training(batch):
            if (action, name) == ("a", "scratch"):
                yield "t", name, size + (3 if batch < 200 else 11) * MIB * batch
            else:
                yield action, name, size

    runs = HandRuns(job, gpu(4096))
    finder = BatchFinder(runs, 1)
    plan = finder.find()
    assert (plan.comfortable, plan.largest, finder.fit) == (199, 399, None)
    outcomes = [runs.on_gpu[batch].outcome for batch in (199, 200, 399, 400)]
    assert outcomes == [
        Outcome.FITS,
        Outcome.FITS_WITH_RETRIES,
        Outcome.FITS_WITH_RETRIES,
        Outcome.DOES_NOT_FIT,
    ]


def evaluating(batch: int, size_mib: int = 0, sample_mib: int = 0) -> Iterator[Move]:
    """Yield the moves of the training, and of an evaluation after its steps."""
    yield from training(batch)
    yield "a", "images", size_mib * MIB + sample_mib * MIB * batch


@pytest.mark.parametrize(
    ("size_mib", "sample_mib", "fits", "most_runs"),
    [
        (10, 0, lambda steps: steps, 5),
        (0, 30, lambda steps: (4096 - 100) // 30, 9),
        (5000, 0, lambda steps: 0, 4),
    ],
)
def test_the_answer_runs_through_the_evaluation(
    size_mib: int, sample_mib: int, fits: Callable[[int], int], most_runs: int
) -> None:
    """An evaluation that takes more memory than the steps decides, for each batch size or for all of them."""
    steps = HandRuns(training, gpu(4096))
    largest_by_steps = BatchFinder(HandRuns(training, gpu(4096)), 1).find().largest
    whole = HandRuns(lambda batch: evaluating(batch, size_mib, sample_mib), gpu(4096))
    finder = BatchFinder(steps, 1, whole)
    found = search_whole(whole, steps, finder.find(), 1, finder.most, finder.notes)
    expected = fits(largest_by_steps)
    assert (found.largest, bool(finder.notes)) == (expected, expected < largest_by_steps)
    assert whole.outcome(expected + 1) is Outcome.DOES_NOT_FIT
    assert steps.count + whole.count <= most_runs
    if expected < largest_by_steps:
        assert finder.notes[0].startswith(
            f"batch {largest_by_steps} runs its first optimizer steps, and needs more"
        )
