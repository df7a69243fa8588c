"""Two runs of a model at different batch sizes on one GPU into the loop that both are of."""

from dataclasses import dataclass, replace
from typing import Any

from planner.capture.symbolic.kernel_calls import Kind, Run, UnsteadyError, join, line_through
from planner.capture.symbolic.recast import Kernel, Loop, opening_end
from planner.program import Alloc, Category, Event, Free, Trace


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call stands among the loop's own events, and what it makes."""

    before: int  # so many of the loop's own events come before it
    outputs: tuple[bool, ...]  # whether the next of them is the birth of its output, for each output
    births: int  # so many outputs take memory
    takes_blas: bool  # cuBLAS takes its workspace here


def find_loop(first: Run, second: Run, cublas_config: str = "") -> Loop:
    """The loop through two runs at different batch sizes on one GPU. Raises UnsteadyError."""
    (low,), (high,) = first.trace.batches, second.trace.batches
    own_a, places_a = _take_apart(first)
    own_b, places_b = _take_apart(second)
    if len(own_a) != len(own_b) or len(places_a) != len(places_b):
        raise UnsteadyError(f"the loop allocates more often at batch {high} than at batch {low}")
    own = _lines(own_a, own_b, first.trace, second.trace)
    numbers: dict[tuple[Any, str, str], int] = {}
    kinds: list[Kind] = []
    sites = {site: number for number, site in enumerate(first.trace.sites)}
    kernels = []
    for a, b, place, other in zip(first.calls, second.calls, places_a, places_b, strict=True):
        if a.func is not b.func or a.site != b.site or place != other:
            raise UnsteadyError(f"{a.func} runs at batch {low} where {b.func} runs at batch {high}")
        pair = (a.func, repr((a.args, a.out)), repr((b.args, b.out)))
        if pair not in numbers:
            numbers[pair] = len(kinds)
            kinds.append((a.func, join(a.args, b.args, low, high), join(a.out, b.out, low, high)))
        kernels.append(_kernel(place, numbers[pair], sites.setdefault(a.site, len(sites))))
    top = 1 + max((event.block for event in own if isinstance(event, Alloc)), default=0)
    trace = replace(first.trace, sites=tuple(sites))
    opening = opening_end(own)
    return Loop(trace, own, tuple(kernels), tuple(kinds), top, opening, {}, cublas_config=cublas_config)


def _take_apart(run: Run) -> tuple[list[Event], list[_Place]]:
    """The loop's own events, and where each call stands among them."""
    own: list[Event] = []
    places = []
    done = 0
    for call in run.calls:
        own += run.trace.events[done : call.start]
        inside = run.trace.events[call.start : call.end]
        done = call.end
        freed = {event.block for event in inside if isinstance(event, Free)}
        births = [event for event in inside if isinstance(event, Alloc)]
        scratch = [event for event in births if event.role is Category.WORKSPACE]
        outputs = [event for event in births if event.role is not Category.WORKSPACE]
        if call.outputs and len(outputs) != sum(call.outputs):
            raise UnsteadyError(f"{call.func} returns a tensor that was there before")
        kept = sum(event.block not in freed for event in scratch)  # cuBLAS's, once for each thread
        flags = call.outputs or (True,) * len(outputs)
        places.append(_Place(len(own), flags, sum(flags), kept > 0))
        own += outputs
    own += run.trace.events[done:]
    return own, places


def _lines(a: list[Event], b: list[Event], one: Trace, other: Trace) -> tuple[Event, ...]:
    """The loop's own events with a line for each size."""
    (low,), (high,) = one.batches, other.batches
    numbers: dict[int, int] = {}
    found: list[Event] = []
    for x, y in zip(a, b, strict=True):
        if isinstance(x, Alloc) and isinstance(y, Alloc):
            where = one.sites[x.site]
            if x.role is not y.role or where != other.sites[y.site]:
                raise UnsteadyError(
                    f"{where.op} runs at batch {low}, {other.sites[y.site].op} at batch {high}"
                )
            line = line_through(x.fixed_bytes, y.fixed_bytes, low, high)
            if line.slope < 0 or line.fixed + line.slope < 0:
                raise UnsteadyError(f"a block of {where.op} shrinks with the batch")
            numbers[x.block] = y.block
            found.append(Alloc(x.block, line.fixed, line.slope, x.role, x.site, x.optional))
            continue
        dies = isinstance(x, Free) and isinstance(y, Free)
        if not (numbers.get(x.block) == y.block if dies else x == y):  # type: ignore[union-attr]
            raise UnsteadyError(f"blocks die in another order at batch {low} than at batch {high}")
        found.append(x)
    return tuple(found)


def _kernel(place: _Place, kind: int, site: int) -> Kernel:
    return Kernel((kind, site), kind, site, place.before, place.outputs, place.births, place.takes_blas)
