"""Any batch size from two traces: every size becomes `fixed_bytes + per_sample_bytes * batch`.

Two traces of one job are aligned event by event. Where they do not align, or a size is no straight line
through whole bytes, the answer is a sentence that says where, and the caller traces each batch size by
itself.
"""

from dataclasses import replace

from planner.events import Alloc, Event, Free, Trace


def align(first: Trace, second: Trace) -> Trace | str:
    """One affine trace through two taken at different batch sizes, or why there is none.

    A size that shrinks with the batch, or would be negative at batch 1, lies on no line that holds for every
    batch size. Raises ValueError for traces that are affine already or were taken at one batch size.
    """
    (low,), (high,) = first.batches, second.batches
    if low == high:
        raise ValueError(f"both traces were taken at batch {low}")
    difference = _first_difference(first, second)
    if difference:
        return difference
    events: list[Event] = []
    for a, b in zip(first.events, second.events, strict=True):
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            slope, rest = divmod(b.fixed_bytes - a.fixed_bytes, high - low)
            fixed_bytes = a.fixed_bytes - slope * low
            if rest or slope < 0 or fixed_bytes + slope < 0:
                flaw = "no whole number of bytes per sample" if rest else "no line that holds for every batch"
                return (
                    f"event {len(events)}: block {a.block} ({_where(first, a)}) takes {a.fixed_bytes} bytes "
                    f"at batch {low} and {b.fixed_bytes} at batch {high}: {flaw}"
                )
            events.append(Alloc(a.block, fixed_bytes, slope, a.role, a.site))
        else:
            events.append(a)
    return replace(first, events=tuple(events), batches=(low, high))


def confirm(affine: Trace, taken: Trace) -> Trace | str:
    """The affine trace, now confirmed at the batch size of `taken` as well, or where the two differ."""
    (batch,) = taken.batches
    difference = _first_difference(affine, taken)
    if difference:
        return difference
    for index, (a, b) in enumerate(zip(affine.events, taken.events, strict=True)):
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            expected_bytes = a.fixed_bytes + a.per_sample_bytes * batch
            if expected_bytes != b.fixed_bytes:
                return (
                    f"event {index}: block {a.block} ({_where(affine, a)}) takes {b.fixed_bytes} bytes at "
                    f"batch {batch}, not {expected_bytes} as the line through {_batches(affine)} says"
                )
    return replace(affine, batches=(*affine.batches, batch))


def _first_difference(one: Trace, other: Trace) -> str:
    """Where two traces of a job part ways, apart from sizes; "" where they do not."""
    for index, (a, b) in enumerate(zip(one.events, other.events, strict=False)):
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            same = a.block == b.block and a.role == b.role and one.sites[a.site] == other.sites[b.site]
        else:
            same = a == b
        if not same:
            return (
                f"event {index} is {_describe(one, a)} at {_batches(one)} and {_describe(other, b)} at "
                f"{_batches(other)}"
            )
    if len(one.events) == len(other.events):
        return ""
    short, long = sorted((one, other), key=lambda trace: len(trace.events))
    index = len(short.events)
    extra = _describe(long, long.events[index])
    return f"event {index} at {_batches(long)} is {extra}; the trace at {_batches(short)} has ended before it"


def _describe(trace: Trace, event: Event) -> str:
    if isinstance(event, Alloc):
        return f"{_where(trace, event)} taking block {event.block} for {event.role}"
    if isinstance(event, Free):
        born = next(
            entry for entry in trace.events if isinstance(entry, Alloc) and entry.block == event.block
        )
        return f"block {event.block} of {_where(trace, born)} given back"
    return f"the mark of step {event.step}, {event.phase}"


def _where(trace: Trace, event: Alloc) -> str:
    site = trace.sites[event.site]
    return f"{site.op} in {site.module or 'the loop'}"


def _batches(trace: Trace) -> str:
    numbers = [str(batch) for batch in trace.batches]
    return f"batch {numbers[0]}" if len(numbers) == 1 else f"batches {' and '.join(numbers)}"
