"""Fit a program to recorded runs at different batch sizes.

Two runs are fitted, or three if sizes grow quadratically.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from planner.capture.symbolic.kernel_calls import KernelSignature, RecordedRun, fit_arguments
from planner.capture.symbolic.rules import SignatureRules
from planner.jobs import Job
from planner.program import (
    Alloc,
    Category,
    Event,
    Fact,
    Free,
    KernelCall,
    NotAffineError,
    Program,
    Site,
    fit_events,
    fit_pinned,
    fit_quadratic_events,
)


class _Place(NamedTuple):
    """The position of a kernel call among the tensor events, and the outputs that it allocates."""

    position: int  # index of the tensor event before which it runs
    outputs: tuple[bool, ...]  # for each output, whether the next tensor event is its allocation
    first_blas_call: bool  # whether cuBLAS allocates the workspace that it keeps
    stream: int


def fit_program(runs: Sequence[RecordedRun], job: Job, unit: int = 1) -> Program:
    """Return the program fitted to two or three runs at different batch sizes on one GPU.

    Three runs must have successive batch sizes. Batch sizes are counted in units of `unit` samples. Raises
    NotAffineError if the runs do not fit.
    """
    traces = [replace(run.trace, batch=run.trace.batch // unit) for run in runs]
    if any(Fact.RANDOM_SIZES in trace.facts for trace in traces):
        raise NotAffineError("sizes depend on random values")
    first = traces[0]
    split = [_split_kernels(run) for run in runs]
    if len(runs) == 2:
        events = fit_events(first, split[0][0], traces[1], split[1][0])
    else:
        events = fit_quadratic_events(traces, [own for own, _ in split])
    sites = {site: number for number, site in enumerate(first.sites)}
    calls, signatures = _fit_calls(runs, [places for _, places in split], [t.batch for t in traces], sites)
    return Program(
        tuple(events),
        tuple(sites),
        tuple(calls),
        unknown_ops=first.unknown_ops,
        notes=first.notes,
        facts=first.facts,
        growth_sources=first.growth_sources,
        pinned=fit_pinned(first, traces[1]),
        unit=unit,
        rules=SignatureRules(job, tuple(signatures)),
    )


def _fit_calls(
    runs: Sequence[RecordedRun],
    places: Sequence[Sequence[_Place]],
    batches: Sequence[int],
    sites: dict[Site, int],
) -> tuple[list[KernelCall], list[KernelSignature]]:
    """Return the kernel calls of a program and their distinct signatures.

    The sites of the calls are added to `sites`. Raises NotAffineError if the runs call different kernels.
    """
    for others in places[1:]:
        if len(others) != len(places[0]):
            raise NotAffineError(
                f"{len(places[0])} kernels run at batch {batches[0]} and {len(others)} at batch {batches[1]}"
            )
    numbers: dict[tuple[Any, ...], int] = {}
    signatures: list[KernelSignature] = []
    calls = []
    of_each = zip(zip(*(run.calls for run in runs), strict=True), zip(*places, strict=True), strict=True)
    for alike, their_places in of_each:
        a, place = alike[0], their_places[0]
        for b, other in zip(alike[1:], their_places[1:], strict=True):
            if a.func is not b.func or a.site != b.site or place != other:
                raise NotAffineError(
                    f"{a.func} runs at batch {batches[0]} where {b.func} runs at batch {batches[1]}"
                )
        key = (a.func, *(repr((call.args, call.out)) for call in alike))
        if key not in numbers:
            numbers[key] = len(signatures)
            args = fit_arguments([call.args for call in alike], batches)
            out = fit_arguments([call.out for call in alike], batches)
            signatures.append((a.func, args, out))
        calls.append(KernelCall(numbers[key], sites.setdefault(a.site, len(sites)), *place))
    return calls, signatures


def _split_kernels(run: RecordedRun) -> tuple[list[Event], list[_Place]]:
    """Return a run's events without kernel workspaces, and a `_Place` for each kernel call.

    Raises NotAffineError if a call returns a tensor that it does not allocate.
    """
    events: list[Event] = []
    places = []
    done = 0
    for call in run.calls:
        events += run.trace.events[done : call.start]
        inside = run.trace.events[call.start : call.end]
        done = call.end
        freed = {event.block for event in inside if isinstance(event, Free)}
        allocs = [event for event in inside if isinstance(event, Alloc)]
        workspaces = [event for event in allocs if event.category is Category.WORKSPACE]
        outputs = [event for event in allocs if event.category is not Category.WORKSPACE]
        if call.outputs and len(outputs) != sum(call.outputs):
            raise NotAffineError(f"{call.func} returns a tensor that was there before")
        stays = any(event.block not in freed for event in workspaces)  # cuBLAS's, once for each thread
        places.append(_Place(len(events), call.outputs or (True,) * len(outputs), stays, call.stream))
        events += outputs
    return events + list(run.trace.events[done:]), places
