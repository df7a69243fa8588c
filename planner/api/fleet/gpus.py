"""`planner.gpus`: the largest batch of one job on every GPU of the database."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

from msgspec.structs import replace

from planner.api.fleet.prices import Throughput, open_prices, price_key, quotes_of, read_throughput
from planner.api.request.budget import (
    budget_for,
    calibration_query,
    corrected_budget,
    find_budget,
    stored_calibrations,
)
from planner.api.request.options import Options
from planner.api.request.request import Model, Request, checked_multiple
from planner.api.request.varying import is_varying, open_any_request, open_sized_programs
from planner.errors import UnsupportedGpuError, UsageError
from planner.hardware import (
    MIB,
    NOT_MODELLED,
    Budget,
    Device,
    PriceList,
    judge_budget,
    load_devices,
    load_other_devices,
    search_devices,
    search_words,
)
from planner.hardware.calibration import find_calibration
from planner.jobs import BatchShape, Compile, Job, check_count, nearest, shown, size_ranges
from planner.planning import (
    Answer,
    DeviceFit,
    EpochPrograms,
    FleetTable,
    Quote,
    Seconds,
    TimedPrograms,
    check_batch,
    find_varying_fit,
    fit_devices,
)
from planner.program import FIT_BATCHES, LARGEST_BATCH, Capability, Outcome, Trace, find_growth
from planner.report import Report, Result, growth_text, report_of

MOST_OF_VARYING = 12  # most GPUs, on each of which runs are sampled for some seconds
MOST_OF_COMPILED = 8  # most kinds of GPU, for each of which several batch sizes are compiled
SORTS: dict[str, Callable[[DeviceFit], Any]] = {
    "max_batch": lambda fit: (-fit.max_batch, fit.budget.device.total.value, fit.budget.device.name),
    "memory": lambda fit: (fit.budget.device.total.value, fit.budget.device.name),
    "name": lambda fit: fit.budget.device.name.lower(),
    "process": lambda fit: (fit.process_bytes, fit.budget.device.name),
    "headroom": lambda fit: (-fit.headroom_bytes, fit.budget.device.name),
}

PRICE_SORTS = ("price", "cost")  # price of an hour, cost of a million samples


@dataclass(frozen=True, slots=True)
class GpusResult(Result):
    """The largest batch, or whether a batch fits, on each listed GPU.

    The rows are in the requested order. `str` gives the text report.
    """

    table: FleetTable

    @property
    def fits(self) -> tuple[DeviceFit, ...]:
        """Return the rows of the table, one for each listed GPU."""
        return self.table.fits

    def to_csv(self) -> str:
        """Return the table as CSV: a header and one line for each GPU."""
        from planner.report import gpus_to_csv

        return gpus_to_csv(self.table)

    def to_scheduler(self, scheduler: str) -> str:
        """Return a request for any of the GPUs that run the job, for slurm, k8s, skypilot or ray.

        Raises UsageError for another name.
        """
        from planner.report import scheduler_text

        return scheduler_text(self.table, scheduler)

    def draw(self, path: Path | str) -> None:
        """Draw peak memory against batch size to a file.

        A line marks the memory limit of each GPU. Needs matplotlib. Raises UsageError if there is nothing to
        draw, and DataFileError.
        """
        from planner.report import draw_gpus

        if size_ranges(self.table.job):
            raise UsageError("--plot: a curve is of samples of one size; remove it, or give one size")

        draw_gpus(self.table, Path(path))

    def _report(self) -> Report:
        from planner.report import gpus_document, gpus_to_json

        return report_of(gpus_document, gpus_to_json, self.table)


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
    prices: str | PathLike[str] | None = None,
    prices_date: str | None = None,
    spot: bool | None = None,
    throughput: Throughput | None = None,
    **options: Unpack[Options],
) -> GpusResult:
    """Return the largest batch size of a model on each known GPU.

    With `batch`, returns the GPUs that run that batch. `model` and the options are as for
    `planner.max_batch`, except `gpu` and `gpu_mib`. `filter` is a text of words, or several, all of which a
    GPU must match as for `planner devices`. `min_mib` and `max_mib` bound the total memory; `devices`
    replaces the database; with `multiple_of`, answers are multiples of it. `prices` is a file in SkyPilot's
    schema, from the day `prices_date`; `spot` selects its spot prices. `throughput` has measured samples per
    second by GPU. With `prices` and without `sort`, the cheapest GPUs come first. Raises the errors of
    `planner.errors`; that nothing fits is a result.
    """
    for name in ("gpu", "gpu_mib", "save_trace"):
        if options.get(name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: all GPUs are planned for; choose with --filter")
    if batch is not None:
        batch = check_count("--batch", batch, LARGEST_BATCH)
    multiple = checked_multiple(multiple_of)
    price_list = open_prices(prices, prices_date, spot)
    quotes = quotes_of(price_list, read_throughput(throughput))
    key = _sort_key(sort, price_list, quotes)
    chosen = choose_devices(devices, filter, min_mib, max_mib)
    start = perf_counter()
    named: Options = {**options, "gpu": chosen[0], "no_calibration": True}
    request = open_any_request(model, named)
    if is_varying(request):
        varying = _table_of_varying(request, chosen, batch, multiple, key, options)
        return GpusResult(replace(varying, prices=price_list, quotes=quotes))
    _check_compiled(request.job, chosen)
    job, programs = request.job, TimedPrograms(request.programs())
    opened = perf_counter()
    if batch is not None:
        check_batch(job, batch)
    budgets, refused = _supported(_budgets(chosen, job, options), programs)
    target = budgets[0].device.target
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
        (*_of_vendors(fits), *refused, *_notes(traces)),
        traces[0].unknown_ops,
        opened - start,
        seconds,
        epochs,
        multiple,
        price_list,
        quotes,
        _likely(fits),
    )
    return GpusResult(table)


def _supported(budgets: Sequence[Budget], programs: TimedPrograms) -> tuple[list[Budget], tuple[str, ...]]:
    """Return the budgets of GPUs that have the job's operators, and notes on the GPUs that have not.

    Raises UnsupportedGpuError if no GPU has them.
    """
    refused: dict[Capability, UnsupportedGpuError] = {}
    by_capability = {one.device.target.capability: one.device.target for one in reversed(budgets)}
    for capability, target in reversed(by_capability.items()):
        try:
            programs.bound(target)  # builds the program from which the next trace comes
            programs.trace(programs.batch_sizes(target).floor(FIT_BATCHES[0]), target)
        except UnsupportedGpuError as error:
            refused[capability] = error
    kept = [budget for budget in budgets if budget.device.target.capability not in refused]
    if not kept:
        raise next(iter(refused.values()))
    count = len(budgets) - len(kept)
    return kept, tuple(
        f"{count} GPUs are left out: {reason}" for reason in dict.fromkeys(map(str, refused.values()))
    )


def _likely(fits: Sequence[DeviceFit]) -> tuple[DeviceFit, ...]:
    """Return the rows with the answer LIKELY or NOT_KNOWN, whose batch may not fit."""
    return tuple(fit for fit in fits if fit.answer in (Answer.LIKELY, Answer.NOT_KNOWN))


def _sort_key(
    sort: str | None, prices: PriceList | None, quotes: Mapping[str, Quote]
) -> Callable[[DeviceFit], Any]:
    """Return the function that computes a row's sort key.

    By default rows are sorted by cost or price if prices are given, or else by the largest batch. Raises
    UsageError for an unknown order, and for missing prices or throughput.
    """
    is_cost_known = any(quote.per_million_samples is not None for quote in quotes.values())
    name = sort or (("cost" if is_cost_known else "price") if prices is not None else "max_batch")
    if name in SORTS:
        return SORTS[name]
    if name not in PRICE_SORTS:
        raise UsageError(f"--sort {sort}: give one of {', '.join((*SORTS, *PRICE_SORTS))}")
    if prices is None:
        raise UsageError(f"--sort {name}: give the prices as well, --prices FILE.csv")
    if name == "cost" and not is_cost_known:
        raise UsageError("--sort cost: give --throughput of GPUs that the file has prices of")

    def by_price(fit: DeviceFit) -> tuple[bool, float, str]:
        gpu = fit.budget.device.name
        return not fit.max_batch, price_key(quotes, gpu, name == "cost"), gpu

    return by_price


def _check_compiled(job: Job, chosen: Sequence[Device]) -> None:
    """Raise UsageError if a job would be compiled for more than `MOST_OF_COMPILED` kinds of GPU."""
    kinds = {device.target.kind for device in chosen}
    if job.model.compile is not Compile.NONE and len(kinds) > MOST_OF_COMPILED:
        raise UsageError(
            f"--compile: several batch sizes are compiled for each kind of GPU, for {MOST_OF_COMPILED} kinds "
            f"at most; these are {len(kinds)}, choose with --filter, or plan without --compile"
        )


def _table_of_varying(
    request: Request,
    chosen: Sequence[Device],
    batch: int | None,
    multiple: int,
    key: Callable[[DeviceFit], Any],
    options: Options,
) -> FleetTable:
    """Return the table of sampled runs on each GPU, for a job whose samples have varying sizes.

    Raises UsageError for too many GPUs.
    """
    if len(chosen) > MOST_OF_VARYING:
        raise UsageError(
            f"--input: samples of many sizes are played on each GPU, on {MOST_OF_VARYING} at most; these are "
            f"{len(chosen)}, choose with --filter, or give one size"
        )
    job, opened = request.job, perf_counter()
    by_kind = {}
    fits = []
    for budget in _budgets(chosen, job, options):
        kind = budget.device.target.kind
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
        (
            *_of_vendors(fits),
            f"samples are of many sizes: sampled batches of runs of {job.samples.run_steps:,} steps",
            *trace.notes,
        ),
        trace.unknown_ops,
        opened - request.start,
        Seconds(spent, perf_counter() - opened - spent),
        first.source(first.sizes.largest),
        multiple,
        likely=_likely(fits),
    )


def _of_vendors(fits: Sequence[DeviceFit]) -> list[str]:
    """Return a note on each vendor whose GPUs are among the rows and are not fully modelled."""
    vendors = dict.fromkeys(fit.budget.device.vendor for fit in fits)
    return [NOT_MODELLED[vendor] for vendor in vendors if vendor in NOT_MODELLED]


def _of_each_capability(fits: Sequence[DeviceFit]) -> list[DeviceFit]:
    """Return one row for each compute capability, the row of its first GPU."""
    return list({fit.budget.device.target.capability: fit for fit in reversed(fits)}.values())[::-1]


def _notes(traces: Sequence[Trace]) -> tuple[str, ...]:
    """Return the distinct notes of all traces, after a note on growth if memory grows in the first trace."""
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
    given = [words] if isinstance(words, str) else list(words or ())
    known = (*load_devices(), *(load_other_devices() if given else ())) if devices is None else tuple(devices)
    for word in (part for one in given for part in one.split()):
        if not search_devices(known, [word]):
            near = nearest(word, search_words(known))
            raise UsageError(
                f"--filter: no GPU matches {shown(word)}" + (f"; the nearest: {near}" if near else "")
            )
    low, high = min_mib or 0, inf if max_mib is None else max_mib
    selected = tuple(one for one in search_devices(known, given) if low <= one.total.value / MIB <= high)
    if not selected:
        raise UsageError("no GPU of the database is left: loosen --filter, --min-mib or --max-mib")
    return selected


def _budgets(chosen: Sequence[Device], job: Job, options: Options) -> list[Budget]:
    """Return a job's budget on each GPU, corrected by a stored calibration if one applies.

    The calibrations are read only once.
    """
    plain = [budget_for(find_budget({**options, "gpu": device}), job) for device in chosen]
    stored = stored_calibrations(plain[0], options)
    query = calibration_query(plain[0], job, options)
    corrections = (find_calibration(stored, replace(query, device=budget.device)) for budget in plain)
    return list(map(corrected_budget, plain, corrections))
