"""Fit two recorded runs at different batch sizes to a program."""

from typing import Any, NamedTuple

from planner.capture.symbolic.kernel_calls import KernelSignature, RecordedRun, fit_affine
from planner.capture.symbolic.rules import SignatureRules
from planner.jobs import Job
from planner.program import (
    Alloc,
    Category,
    Event,
    Free,
    KernelCall,
    NotAffineError,
    Program,
    fit_events,
    fit_pinned,
)


class _Place(NamedTuple):
    """The place of a call among the tensor events, and what it allocates."""

    position: int  # index of the tensor event before which it runs
    outputs: tuple[bool, ...]  # for each output, whether the next tensor event is its allocation
    first_blas_call: bool
    stream: int


def fit_program(first: RecordedRun, second: RecordedRun, job: Job) -> Program:
    """Return the program of two runs at different batch sizes on one GPU. Raises NotAffineError."""
    low, high = first.trace.batch, second.trace.batch
    if first.trace.has_random_sizes or second.trace.has_random_sizes:
        raise NotAffineError("sizes depend on random values")
    ones, places = _split_kernels(first)
    others, other_places = _split_kernels(second)
    events = fit_events(first.trace, ones, second.trace, others)
    if len(places) != len(other_places):
        raise NotAffineError(
            f"{len(places)} kernels run at batch {low} and {len(other_places)} at batch {high}"
        )
    numbers: dict[tuple[Any, str, str], int] = {}
    signatures: list[KernelSignature] = []
    sites = {site: number for number, site in enumerate(first.trace.sites)}
    calls = []
    for a, b, place, other in zip(first.calls, second.calls, places, other_places, strict=True):
        if a.func is not b.func or a.site != b.site or place != other:
            raise NotAffineError(f"{a.func} runs at batch {low} where {b.func} runs at batch {high}")
        key = (a.func, repr((a.args, a.out)), repr((b.args, b.out)))
        if key not in numbers:
            numbers[key] = len(signatures)
            signatures.append(
                (a.func, fit_affine(a.args, b.args, low, high), fit_affine(a.out, b.out, low, high))
            )
        site = sites.setdefault(a.site, len(sites))
        calls.append(KernelCall(numbers[key], site, *place))
    return Program(
        tuple(events),
        tuple(sites),
        tuple(calls),
        unknown_ops=first.trace.unknown_ops,
        notes=first.trace.notes,
        growth_sources=first.trace.growth_sources,
        pinned=fit_pinned(first.trace, second.trace),
        rules=SignatureRules(job, tuple(signatures)),
    )


def _split_kernels(run: RecordedRun) -> tuple[list[Event], list[_Place]]:
    """Return the tensor events, and the place of each call among them."""
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
