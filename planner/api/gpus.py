"""`planner gpus` for Python: one job on every card of the database."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

from msgspec.structs import replace

from planner.api.budget import (
    budget_for,
    calibration_query,
    corrected_budget,
    make_budget,
    stored_calibrations,
)
from planner.api.options import Options
from planner.api.request import Model, Request, find_multiple
from planner.api.varying import is_varying, open_any_request, open_sized_programs
from planner.errors import UsageError
from planner.hardware import MIB, Budget, Device, judge_budget, load_devices, search_devices
from planner.hardware.calibration import find_calibration
from planner.jobs import BatchShape, Job, check_count, size_ranges
from planner.planning import (
    DeviceFit,
    EpochPrograms,
    FleetTable,
    Seconds,
    TimedPrograms,
    check_batch,
    find_varying_fit,
    fit_devices,
)
from planner.program import FIT_BATCHES, LARGEST_BATCH, Outcome, Trace, find_growth
from planner.report import Result, growth_text

MOST_OF_VARYING = 12  # GPUs, on each of which runs are sampled for some seconds
SORTS: dict[str, Callable[[DeviceFit], Any]] = {
    "max_batch": lambda fit: (-fit.max_batch, fit.budget.device.total.value, fit.budget.device.name),
    "memory": lambda fit: (fit.budget.device.total.value, fit.budget.device.name),
    "name": lambda fit: fit.budget.device.name.lower(),
    "process": lambda fit: (fit.process_bytes, fit.budget.device.name),
    "headroom": lambda fit: (-fit.headroom_bytes, fit.budget.device.name),
}


@dataclass(frozen=True, slots=True)
class GpusResult(Result):
    """The cards, in the requested order; `str` gives the text report."""

    table: FleetTable

    @property
    def fits(self) -> tuple[DeviceFit, ...]:
        """Return the answer for each GPU."""
        return self.table.fits

    def to_csv(self) -> str:
        """Return one line for each card, after a line of names."""
        from planner.report import gpus_to_csv

        return gpus_to_csv(self.table)

    def draw(self, path: Path) -> None:
        """Draw peak memory against batch size with each card's line. Needs matplotlib; raises UsageError
        where there is nothing to draw, DataFileError.
        """
        from planner.report import draw_gpus

        if size_ranges(self.table.job):
            raise UsageError("--plot: a curve is of samples of one size; leave it away, or give one size")

        draw_gpus(self.table, path)


def gpus(
    model: Model | None = None,
    batch: int | None = None,
    *,
    sort: str | None = None,
    filter: str | Sequence[str] | None = None,
    min_mib: int | None = None,
    max_mib: int | None = None,
    devices: Sequence[Device] | None = None,
    multiple_of: int | None = None,
    **options: Unpack[Options],
) -> GpusResult:
    """Return the largest batch size of a model on every known GPU; with `batch`, those that run it.

    `model` and the options are as for `planner.max_batch`, but for `gpu` and `gpu_mib`. `filter` are words
    as `planner devices` takes them, each card has to match one of its texts; `min_mib` and `max_mib` bound
    the total memory; `devices` stand in place of the database; with `multiple_of`, answers are multiples.
    Raises the errors of `planner.errors`; that nothing fits is a result.
    """
    for name in ("gpu", "gpu_mib", "save_trace"):
        if options.get(name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: all GPUs are planned for; choose with --filter")
    if batch is not None:
        check_count("--batch", batch, LARGEST_BATCH)
    multiple = find_multiple(multiple_of)
    key = SORTS.get(sort or "max_batch")
    if key is None:
        raise UsageError(f"--sort {sort}: give one of {', '.join(SORTS)}")
    cards = choose_devices(devices, filter, min_mib, max_mib)
    start = perf_counter()
    named: Options = {**options, "gpu": cards[0], "no_calibration": True}
    request = open_any_request(model, named)
    if is_varying(request):
        return GpusResult(_table_of_varying(request, cards, batch, multiple, key, options))
    job, programs = request.job, TimedPrograms(request.programs())
    opened = perf_counter()
    if batch is not None:
        check_batch(job, batch)
    budgets = _budgets(cards, job, options)
    target = budgets[0].device.target
    programs.bound(target)  # builds the program, which the next trace is of
    first = programs.trace(programs.batch_sizes(target).floor(FIT_BATCHES[0]), target)
    budgets = [judge_budget(budget, job, first) for budget in budgets]
    epochs = EpochPrograms(job, programs)
    fits = fit_devices(job, budgets, epochs, batch, multiple)
    shown = [fit for fit in fits if batch is None or fit.outcome is not Outcome.DOES_NOT_FIT]
    seconds = Seconds(programs.seconds, perf_counter() - opened - programs.seconds)
    traces = [programs.trace(fit.batch, fit.budget.device.target) for fit in _of_each_capability(fits)]
    table = FleetTable(
        job,
        batch,
        budgets[0].confidence,
        tuple(sorted(shown, key=key)),
        len(fits) - len(shown),
        _notes(traces),
        traces[0].unknown_ops,
        opened - start,
        seconds,
        epochs,
        multiple,
    )
    return GpusResult(table)


def _table_of_varying(
    request: Request,
    cards: Sequence[Device],
    batch: int | None,
    multiple: int,
    key: Callable[[DeviceFit], Any],
    options: Options,
) -> FleetTable:
    """Return the table of a job whose samples are of many sizes: sampled runs on each GPU."""
    if len(cards) > MOST_OF_VARYING:
        raise UsageError(
            f"--input: samples of many sizes are played on each GPU, on {MOST_OF_VARYING} at most; these are "
            f"{len(cards)}, choose with --filter, or give one size"
        )
    job, opened = request.job, perf_counter()
    by_kind = {}
    fits = []
    for budget in _budgets(cards, job, options):
        target = budget.device.target
        kind = target.capability, target.sm_count
        if kind not in by_kind:
            by_kind[kind] = open_sized_programs(request, budget)
        request.on_progress(f"sampling runs on {budget.device.name}")
        fits.append(find_varying_fit(job, budget, by_kind[kind], batch, multiple))
    shown = [fit for fit in fits if batch is None or fit.outcome is not Outcome.DOES_NOT_FIT]
    spent = sum(programs.seconds for programs in by_kind.values())
    first = next(iter(by_kind.values()))
    trace = first.trace(BatchShape(FIT_BATCHES[0], first.sizes.largest))
    return FleetTable(
        job,
        batch,
        fits[0].budget.confidence,
        tuple(sorted(shown, key=key)),
        len(fits) - len(shown),
        (f"samples are of many sizes: sampled batches of runs of {job.run_steps:,} steps", *trace.notes),
        trace.unknown_ops,
        opened - request.start,
        Seconds(spent, perf_counter() - opened - spent),
        first.source(first.sizes.largest),
        multiple,
    )


def _of_each_capability(fits: Sequence[DeviceFit]) -> list[DeviceFit]:
    """Return the first GPU of each compute capability."""
    return list({fit.budget.device.target.capability: fit for fit in reversed(fits)}.values())[::-1]


def _notes(traces: Sequence[Trace]) -> tuple[str, ...]:
    """Return the notes of traces on GPUs of all compute capabilities."""
    notes, growth = [note for trace in traces for note in trace.notes], find_growth(traces[0])
    if growth is not None:
        notes.insert(0, f"at batch {traces[0].batch}, {growth_text(growth, None)}")
    return tuple(dict.fromkeys(notes))


def choose_devices(
    devices: Sequence[Device] | None,
    words: str | Sequence[str] | None,
    min_mib: int | None,
    max_mib: int | None,
) -> tuple[Device, ...]:
    cards = tuple(load_devices() if devices is None else devices)
    given = [words] if isinstance(words, str) else list(words or ())
    low, high = min_mib or 0, inf if max_mib is None else max_mib
    selected = tuple(card for card in search_devices(cards, given) if low <= card.total.value / MIB <= high)
    if not selected:
        raise UsageError("no GPU of the database is left: loosen --filter, --min-mib or --max-mib")
    return selected


def _budgets(cards: Sequence[Device], job: Job, options: Options) -> list[Budget]:
    """Return the budget of each GPU; the stored calibrations are read once."""
    plain = [budget_for(make_budget({**options, "gpu": card}), job) for card in cards]
    stored = stored_calibrations(plain[0], options)
    query = calibration_query(plain[0], job, options)
    corrections = (find_calibration(stored, replace(query, device=budget.device)) for budget in plain)
    return list(map(corrected_budget, plain, corrections))
