"""`planner gpus` for Python: one job on every card of the database."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from planner._support.versions import installed_version
from planner.api.budget import calibration_query, make_budget, stored_calibrations
from planner.api.options import Options
from planner.api.request import (
    Model,
    find_multiple,
    ignore_progress,
    isolation_limit,
    make_job,
    open_request,
    open_stores,
    stores_for,
)
from planner.capture.subprocess import FromApart, apart_of
from planner.errors import UsageError
from planner.hardware import (
    MIB,
    Budget,
    Device,
    judge_budget,
    load_devices,
    make_budget as make_device_budget,
    search_devices,
)
from planner.hardware.calibration import Correction, find_calibration
from planner.jobs import Job, check_count
from planner.planning import (
    FIT_BATCHES,
    LARGEST_BATCH,
    CardFit,
    CardTable,
    Factory,
    OnProgress,
    OverEpoch,
    Seconds,
    TraceSource,
    check_batch,
    fit_cards,
    starter_of,
    take_alone,
    trace_workload,
)
from planner.program import Floor, Outcome, Target, Trace, find_growth, least_bytes
from planner.report import Result, growth_text
from planner.store import KeptCards, SavedTraces, open_saved

if TYPE_CHECKING:
    from planner.capture.symbolic import Loop, Loops

SORTS: dict[str, Callable[[CardFit], Any]] = {
    "max_batch": lambda fit: (-fit.max_batch, fit.budget.device.total.value, fit.budget.device.name),
    "memory": lambda fit: (fit.budget.device.total.value, fit.budget.device.name),
    "name": lambda fit: fit.budget.device.name.lower(),
    "process": lambda fit: (fit.process_bytes, fit.budget.device.name),
    "headroom": lambda fit: (-fit.headroom_bytes, fit.budget.device.name),
}


@dataclass(frozen=True, slots=True)
class GpusResult(Result):
    """The cards, in the order asked for; `str` gives the text report."""

    table: CardTable

    @property
    def fits(self) -> tuple[CardFit, ...]:
        """What each card can do with the job."""
        return self.table.fits

    def to_csv(self) -> str:
        """One line for each card, after a line of names."""
        from planner.report import gpus_to_csv

        return gpus_to_csv(self.table)

    def draw(self, path: Path) -> None:
        """Draw peak memory against batch size with each card's line. Needs matplotlib; raises UsageError
        where there is nothing to draw, DataFileError.
        """
        from planner.report import draw_gpus

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
    """The largest batch size of a model on every known GPU; with `batch`, those that run it.

    `model` and the options are as for `planner.max_batch`, but for `gpu` and `gpu_mib`. `filter` are words
    as `planner devices` takes them, each card has to match one of its texts; `min_mib` and `max_mib` bound
    the total memory; `devices` stand in place of the database; with `multiple_of`, answers are multiples.
    Raises the errors of `planner.errors`; that
    nothing fits is a result.
    """
    for name in ("gpu", "gpu_mib", "save_trace"):
        if options.get(name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: this asks every GPU; choose some with --filter")
    if batch is not None:
        check_count("--batch", batch, LARGEST_BATCH)
    multiple = find_multiple(multiple_of)
    key = SORTS.get(sort or "max_batch")
    if key is None:
        raise UsageError(f"--sort {sort}: give one of {', '.join(SORTS)}")
    cards = _chosen(devices, filter, min_mib, max_mib)
    on_progress = options.get("on_progress") or ignore_progress
    start = perf_counter()
    job, traces = _open(model, options, on_progress)
    opened = perf_counter()
    if batch is not None:
        check_batch(job, batch)
    budgets = _budgets(cards, job, options)
    first = traces.at(FIT_BATCHES[0], budgets[0].device.target)
    budgets = [judge_budget(budget, job, first) for budget in budgets]
    fits = _fit(job, traces, budgets, batch, multiple)
    kept = [fit for fit in fits if batch is None or fit.outcome is not Outcome.DOES_NOT_FIT]
    traced = traces.loops.seconds if isinstance(traces, _FromLoops) else 0.0
    seconds = Seconds(traced, perf_counter() - opened - traced)
    any_trace = traces.at(fits[0].batch, fits[0].budget.device.target)
    table = CardTable(
        job,
        batch,
        budgets[0].confidence,
        tuple(sorted(kept, key=key)),
        len(fits) - len(kept),
        (*_growth_notes(any_trace, fits[0].batch), *_notes(any_trace, job, traces, fits)),
        any_trace.unknown_ops,
        opened - start,
        seconds,
        OverEpoch(job, traces) if job.dataset_size else traces,
        multiple,
    )
    return GpusResult(table)


def _growth_notes(one: Trace, batch: int) -> tuple[str, ...]:
    growth = find_growth(one, batch)
    return () if growth is None else (f"at batch {batch}, {growth_text(growth, None)}",)


def _notes(
    one: Trace,
    job: Job,
    traces: "SavedTraces | _FromLoops | FromApart | KeptCards",
    fits: Sequence[CardFit],
) -> tuple[str, ...]:
    """What stands behind the table: the notes of one trace, and what a library says of the others' GPUs."""
    if not job.cudnn or not isinstance(traces, _FromLoops):
        return one.notes
    from planner.capture import notes_on_cudnn

    capabilities = {fit.budget.device.target.capability for fit in fits}
    told = [note for capability in sorted(capabilities) for note in notes_on_cudnn(job, capability)]
    return tuple(dict.fromkeys((*one.notes, *told)))


def _chosen(
    devices: Sequence[Device] | None,
    words: str | Sequence[str] | None,
    min_mib: int | None,
    max_mib: int | None,
) -> tuple[Device, ...]:
    cards = tuple(load_devices() if devices is None else devices)
    given = [words] if isinstance(words, str) else list(words or ())
    low, high = (min_mib or 0) * MIB, (max_mib or 2**40) * MIB
    found = [card for card in search_devices(cards, given) if low <= card.total.value <= high]
    if not found:
        raise UsageError("no GPU of the database is left: loosen --filter, --min-mib or --max-mib")
    return tuple(found)


def _budgets(cards: Sequence[Device], job: Job, options: Options) -> list[Budget]:
    """What each card leaves to the allocator; the stored calibrations are read once."""
    plain = []
    for card in cards:
        named: Options = {**options, "gpu": card}
        plain.append(make_budget(named))
    stored = stored_calibrations(plain[0], options)
    wanted = calibration_query(plain[0], job, options)
    return [
        _calibrated(budget, find_calibration(stored, msgspec.structs.replace(wanted, device=budget.device)))
        for budget in plain
    ]


def _calibrated(budget: Budget, found: Correction | None) -> Budget:
    if found is None:
        return budget
    return make_device_budget(
        budget.device, budget.confidence, budget.arena.rules, budget.cap_bytes, found, budget.likeness
    )


@dataclass(slots=True)
class _FromLoops:
    """The traces that loops of the model say; where there are none, or they proved wrong, each is taken by
    itself.
    """

    job: Job
    factory: Factory | None
    loops: "Loops"
    on_progress: OnProgress
    note: str
    _slow: dict[Target, TraceSource] = field(default_factory=dict)
    _quick: dict[int, "Loop"] = field(default_factory=dict)  # by the loop that it is the same as
    _floors: dict[int, Floor] = field(default_factory=dict)  # of each loop

    def at(self, batch: int, chip: Target) -> Trace:
        loop = self.loop(chip)
        if loop is None:
            return self._slow[chip](batch)
        quick = self._quick.get(id(loop))
        if quick is None:
            quick = self._quick[id(loop)] = loop.unplaced()
        taken = quick.at(batch, self.loops.equip(chip))
        return replace(taken, notes=(*taken.notes, self.note))

    def kin(self, batch: int, chip: Target) -> Hashable:
        loop = self.loop(chip)
        return None if loop is None else (id(loop), loop.answers(batch, self.loops.equip(chip)))

    def floor(self, chip: Target) -> Floor:
        loop = self.loop(chip)
        if loop is None:
            return _no_floor
        if id(loop) not in self._floors:
            self._floors[id(loop)] = least_bytes(loop.own)
        return self._floors[id(loop)]

    def distrust(self, chip: Target) -> None:
        """Take every trace for such GPUs by itself from now on."""
        self._slow[chip] = trace_workload(self.job, None, self.factory, chip, take_alone).open(
            self.on_progress
        )

    def loop(self, chip: Target) -> "Loop | None":
        """The loop that answers for such GPUs."""
        from planner.capture.symbolic import UnsteadyError

        if chip not in self._slow:
            try:
                return self.loops.of(chip)
            except UnsteadyError:
                self.distrust(chip)
        return None


def _no_floor(batch: int) -> int:
    return 0


def _open(
    model: Model | None, options: Options, on_progress: OnProgress
) -> tuple[Job, "SavedTraces | _FromLoops | FromApart | KeptCards"]:
    """The job and its traces; imports what they need."""
    path = options.get("trace")
    if path is not None:
        named: Options = {**options, "gpu": load_devices()[0], "no_calibration": True}
        job = open_request(model, named).job  # refuses what the file says as well
        return job, open_saved(Path(path)).traces
    shelves = open_stores(options)
    job, _, factory = make_job(model, options, shelves)
    limit_seconds = isolation_limit(options)
    if limit_seconds is not None:
        return job, FromApart(job, apart_of(job, factory, limit_seconds))
    shelves = stores_for(job, factory, shelves)
    if shelves is not None:
        return job, KeptCards(job, shelves, starter_of(job, on_progress))
    on_progress("importing torch and the model's library")
    from planner.capture.models import construct_model, find_constructor
    from planner.capture.symbolic import Loops

    constructor = factory or find_constructor(job)
    loops = Loops(job, lambda job: construct_model(job, constructor), on_progress)
    note = f"traced with PyTorch {installed_version('torch')}; other versions keep other tensors"
    return job, _FromLoops(job, factory, loops, on_progress, note)


def _fit(
    job: Job,
    traces: "SavedTraces | _FromLoops | FromApart | KeptCards",
    budgets: Sequence[Budget],
    batch: int | None,
    multiple_of: int,
) -> tuple[CardFit, ...]:
    """The cards. Each loop is held against a run at the largest answer that it gave; where it proves wrong,
    its cards are asked again.
    """
    if isinstance(traces, FromApart):
        return traces.fit(budgets, batch, multiple_of)
    played = OverEpoch(job, traces) if job.dataset_size else traces
    fits = fit_cards(budgets, played, batch, multiple_of=multiple_of)
    if not isinstance(traces, _FromLoops):
        return fits
    doubted = _doubted(traces, fits)
    for chip in doubted:
        traces.distrust(chip)
    again = [budget for budget in budgets if budget.device.target in doubted]
    kept = [fit for fit in fits if fit.budget.device.target not in doubted]
    said = {fit.budget.arena: fit.max_batch for fit in fits}  # by the loop, which is not far off
    return (*kept, *fit_cards(again, played, batch, said, multiple_of))


def _doubted(traces: _FromLoops, fits: Sequence[CardFit]) -> set[Target]:
    """The kinds of GPUs whose loop is not what a run at their largest answer gives.

    Where a loop proves wrong it is for large batches, as beyond 2**31 elements: those that stay below are
    found by bisection.
    """
    users: dict[int, dict[Target, int]] = {}
    for fit in sorted(fits, key=lambda fit: fit.max_batch):
        loop = traces.loop(fit.budget.device.target)
        if loop is not None:
            largest = users.setdefault(id(loop), {})
            largest.pop(fit.budget.device.target, None)
            largest[fit.budget.device.target] = max(1, fit.max_batch)

    def differs(user: tuple[Target, int]) -> bool:
        return bool(traces.loops.confirm(user[1], user[0]))

    doubted: set[Target] = set()
    for largest in users.values():
        rising = list(largest.items())
        if differs(rising[-1]):
            doubted |= {chip for chip, _ in rising[bisect_left(rising[:-1], True, key=differs) :]}
    return doubted
