"""The same loop at another batch size or on another GPU without running it once more.

Two runs of a model at different batch sizes tell, for everything that the model itself allocates, a straight
line in the batch size. What kernels take beside it is a step function of shapes and of the GPU, but the rules
of `scratch/` know it from the shapes alone: so the runs note each call of an operator that has a rule, with
the shapes of its tensors, and for any batch size and GPU the rules are asked again. That gives
the trace that a run would have given, in a hundredth of its time, as long as the model takes the same path;
`differs` tells whether a run did.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from planner.chip import Chip
from planner.cublas import workspace_bytes
from planner.events import Alloc, Event, Free, Mark, Phase, Role, Site, Trace
from planner.trace.scratch import Held, Made, rule_of
from planner.trace.scratch.steps import Release, Step, Trial


@dataclass(frozen=True, slots=True)
class Call:
    """An operator that has a rule, as a run met it; its events are those from `start` to `end`."""

    start: int
    end: int
    site: Site
    func: Any
    args: Any  # with each tensor as its `Shape`
    out: Any
    outputs: tuple[bool, ...]  # which of the tensors that its rule makes take memory


@dataclass(slots=True)
class Calls:
    """Collects the calls of one trace; a recorder tells it of each."""

    found: list[Call] = field(default_factory=list)

    def on_kernel(
        self, start: int, end: int, site: Site, func: Any, args: Any, out: Any, outputs: Sequence[Tensor]
    ) -> None:
        """An operator has run, and its events are recorded; `outputs` are those that its rule makes."""
        takes = tuple(t.device.type == "meta" and t.untyped_storage().nbytes() > 0 for t in outputs)
        self.found.append(Call(start, end, site, func, _frozen(args), _frozen(out), takes))


@dataclass(frozen=True, slots=True)
class Shape:
    """As much of a tensor on meta as rules look at."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the loop: its trace, and the calls in it."""

    trace: Trace
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """A whole number that is a straight line in the batch size."""

    fixed: int
    slope: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a call stands among the loop's own events, and what it makes."""

    before: int  # so many of the loop's own events come before it
    outputs: tuple[bool, ...]  # whether the next of them is the birth of its output, for each output
    births: int  # so many outputs take memory
    takes_blas: bool  # cuBLAS takes its workspace here


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A call of the loop."""

    key: tuple[int, int]  # the two below
    kind: int  # of the distinct calls
    site: int  # of the blocks of its kernel
    before: int  # as in its `_Place`, like the rest
    outputs: tuple[bool, ...]
    births: int
    takes_blas: bool


def _kernel(place: _Place, kind: int, site: int) -> _Kernel:
    return _Kernel((kind, site), kind, site, place.before, place.outputs, place.births, place.takes_blas)


class UnsteadyError(Exception):
    """Two runs are not the same loop at two batch sizes; the text says where they part."""


_Kind = tuple[Any, Any, Any]  # operator, arguments and result of calls that are alike at every batch size


@dataclass(frozen=True, slots=True)
class Loop:
    """The loop at any batch size on any GPU on which the model takes the same path."""

    trace: Trace  # of the first run: its notes, sites, unknown operators
    own: tuple[Event, ...]  # events of the loop without its kernels' scratch memory, affine in the batch size
    kernels: tuple[_Kernel, ...]
    kinds: tuple[_Kind, ...]
    first_number: int  # of blocks that are not in `own`
    second_step: int  # so many events of `own` come before it
    asked: dict[tuple[int, int, Chip], tuple[Step, ...]]  # what the rules have said already
    passed: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)  # to them, at one batch size
    placed: dict[tuple[int, tuple[Step, ...], int], list[Event]] = field(
        default_factory=dict
    )  # of each kernel
    cublas_config: str = ""  # the text of CUBLAS_WORKSPACE_CONFIG

    def at(self, batch: int, chip: Chip) -> Trace:
        """The trace that a run at this batch size on such a GPU would give. Blocks have other numbers, and
        those of scratch memory come again when they are free.
        """
        return self._splice(batch, chip, len(self.own))

    def opening_at(self, batch: int, chip: Chip) -> Trace:
        """The same up to the second step, or the end."""
        return self._splice(batch, chip, self.second_step)

    def unplaced(self) -> "Loop":
        """The same with scratch memory put down to the first kernel of its kind: traces in half the time."""
        first: dict[int, int] = {}
        sites = [first.setdefault(kernel.kind, kernel.site) for kernel in self.kernels]
        kernels = tuple(
            replace(kernel, key=(kernel.kind, site), site=site)
            for kernel, site in zip(self.kernels, sites, strict=True)
        )
        return replace(self, kernels=kernels, placed={})

    def answers(self, batch: int, chip: Chip) -> tuple[Hashable, ...]:
        """All that can differ between GPUs at a batch size: what the kernels take."""
        steps = (self._steps(kind, batch, chip) for kind in range(len(self.kinds)))
        return workspace_bytes(chip.capability, self.cublas_config), *steps

    def _splice(self, batch: int, chip: Chip, stop: int) -> Trace:
        events: list[Event] = []
        done, own = 0, self.own
        known: dict[tuple[int, int], list[Event] | None] = {}
        for place, kernel in enumerate(self.kernels):
            key, before, births, takes_blas = kernel.key, kernel.before, kernel.births, kernel.takes_blas
            if before >= stop:
                break
            if key not in known:
                steps = self._steps(kernel.kind, batch, chip)
                simple = _comes_after(steps, kernel.outputs)
                known[key] = _made(steps, (), 0, kernel.site, self.first_number) if simple else None
            scratch = known[key]
            if scratch is not None and not takes_blas:
                if scratch:
                    end = before + births
                    events += own[done:end]
                    events += scratch
                    done = end
                continue
            events += own[done:before]
            done = before + births
            blas_bytes = workspace_bytes(chip.capability, self.cublas_config) if takes_blas else 0
            events += self._placed(place, self._steps(kernel.kind, batch, chip), blas_bytes)
        events += own[done:stop]
        return replace(self.trace, events=tuple(events), batches=(batch,), details=())

    def _placed(self, place: int, steps: tuple[Step, ...], blas_bytes: int) -> list[Event]:
        """The events of a kernel with its outputs among them, all else being the same at any batch."""
        key = (place, steps, blas_bytes)
        found = self.placed.get(key)
        if found is None:
            kernel = self.kernels[place]
            made = iter(self.own[kernel.before : kernel.before + kernel.births])
            outputs = [[next(made)] if takes else [] for takes in kernel.outputs]
            # cuBLAS's stays: it gets a number that no scratch memory has
            number = self.first_number + (1000 * (1 + kernel.before) if kernel.takes_blas else 0)
            found = self.placed[key] = _made(steps, outputs, blas_bytes, kernel.site, number)
        return found

    def _steps(self, kind: int, batch: int, chip: Chip) -> tuple[Step, ...]:
        key = (kind, batch, chip)
        found = self.asked.get(key)
        if found is None:
            func, args, out = self.kinds[kind]
            rule = rule_of(func)
            if rule is None:
                found = ()
            else:
                if (kind, batch) not in self.passed:
                    if self.passed and next(iter(self.passed))[1] != batch:
                        self.passed.clear()
                    self.passed[kind, batch] = _thawed(args, batch), _thawed(out, batch)
                found = tuple(rule(*self.passed[kind, batch], chip))
            self.asked[key] = found
        return found


def find_loop(first: Run, second: Run, cublas_config: str = "") -> Loop:
    """The loop through two runs at different batch sizes on one GPU. Raises UnsteadyError."""
    (low,), (high,) = first.trace.batches, second.trace.batches
    own_a, places_a = _take_apart(first)
    own_b, places_b = _take_apart(second)
    if len(own_a) != len(own_b) or len(places_a) != len(places_b):
        raise UnsteadyError(f"the loop allocates more often at batch {high} than at batch {low}")
    own = _lines(own_a, own_b, first.trace, second.trace)
    numbers: dict[tuple[Any, str, str], int] = {}
    kinds: list[_Kind] = []
    sites = {site: number for number, site in enumerate(first.trace.sites)}
    kernels = []
    for a, b, place, other in zip(first.calls, second.calls, places_a, places_b, strict=True):
        if a.func is not b.func or a.site != b.site or place != other:
            raise UnsteadyError(f"{a.func} runs at batch {low} where {b.func} runs at batch {high}")
        pair = (a.func, repr((a.args, a.out)), repr((b.args, b.out)))
        if pair not in numbers:
            numbers[pair] = len(kinds)
            kinds.append((a.func, _joined(a.args, b.args, low, high), _joined(a.out, b.out, low, high)))
        kernels.append(_kernel(place, numbers[pair], sites.setdefault(a.site, len(sites))))
    top = 1 + max((event.block for event in own if isinstance(event, Alloc)), default=0)
    trace = replace(first.trace, sites=tuple(sites))
    opening = opening_end(own)
    return Loop(trace, own, tuple(kernels), tuple(kinds), top, opening, {}, cublas_config=cublas_config)


def opening_end(events: Sequence[Event]) -> int:
    """So many events come before the second step, or the end."""
    marks = ((index, event) for index, event in enumerate(events) if isinstance(event, Mark))
    later = (index for index, mark in marks if mark.step > 1 or mark.phase is Phase.END)
    return next(later, len(events))


def differs(one: Trace, other: Trace) -> str:
    """Where two traces of one batch size differ apart from the numbers of blocks; "" where they do not."""
    (batch,) = one.batches
    numbers: dict[int, int] = {}
    for index, (a, b) in enumerate(zip(one.events, other.events, strict=False)):
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            sizes = [event.fixed_bytes + event.per_sample_bytes * batch for event in (a, b)]
            same = sizes[0] == sizes[1] and (a.role, a.optional) == (b.role, b.optional)
            same = same and one.sites[a.site] == other.sites[b.site]
            numbers[a.block] = b.block
        elif isinstance(a, Free) and isinstance(b, Free):
            same = numbers.get(a.block) == b.block
        else:
            same = isinstance(a, Mark) and a == b
        if not same:
            return f"event {index} at batch {batch}"
    return "" if len(one.events) == len(other.events) else f"the number of events at batch {batch}"


# ---- taking a run apart


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
        scratch = [event for event in births if event.role is Role.WORKSPACE]
        outputs = [event for event in births if event.role is not Role.WORKSPACE]
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
            line = _straight(x.fixed_bytes, y.fixed_bytes, low, high)
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


def _straight(a: int, b: int, low: int, high: int) -> _Line:
    slope, rest = divmod(b - a, high - low)
    if rest:
        raise UnsteadyError(
            f"{a} at batch {low} and {b} at batch {high} lie on no line through whole numbers"
        )
    return _Line(a - slope * low, slope)


# ---- arguments


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Shape(tuple(value.shape), tuple(value.stride()), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item) for item in value)
    return value


def _joined(a: Any, b: Any, low: int, high: int) -> Any:
    """What two runs passed to one call, with a line for each number that is not the same."""
    if isinstance(a, Shape) and isinstance(b, Shape):
        if a.dtype is not b.dtype or len(a.sizes) != len(b.sizes):
            raise UnsteadyError(f"a tensor has another type at batch {high} than at batch {low}")
        sizes, strides = _joined(a.sizes, b.sizes, low, high), _joined(a.strides, b.strides, low, high)
        return Shape(sizes, strides, a.dtype)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(_joined(one, other, low, high) for one, other in zip(a, b, strict=True))
    if type(a) is int and type(b) is int:
        return a if a == b else _straight(a, b, low, high)
    if a == b:
        return a
    raise UnsteadyError(f"an argument is {a!r} at batch {low} and {b!r} at batch {high}")


def _thawed(value: Any, batch: int) -> Any:
    if isinstance(value, _Line):
        return value.fixed + value.slope * batch
    if isinstance(value, Shape):
        sizes, strides = _thawed(value.sizes, batch), _thawed(value.strides, batch)
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return tuple(_thawed(item, batch) for item in value)
    return value


# ---- a kernel's events, as `Recorder._note_kernel` records them


def _comes_after(steps: tuple[Step, ...], outputs: tuple[bool, ...]) -> bool:
    """Whether the kernel takes its scratch memory once all its outputs are made, or has neither."""
    if Made.OUTPUT in steps:
        return False
    return Made.REST not in steps or steps[0] is Made.REST or not any(outputs)


def _made(
    steps: tuple[Step, ...], outputs: Sequence[list[Event]], blas_bytes: int, site: int, number: int
) -> list[Event]:
    """New blocks are numbered from `number`, at most one for each event."""
    events: list[Event] = []
    held: list[int] = []
    coming = iter(outputs)
    if Made.OUTPUT not in steps and Made.REST not in steps:
        steps = (Made.REST, *steps)
    for step in (*steps, Made.REST):
        if step is Made.OUTPUT:
            events += next(coming, [])
        elif step is Made.REST:
            events += chain.from_iterable(coming)
        elif step is Made.RELEASE or isinstance(step, Release):
            count = step.blocks if isinstance(step, Release) else len(held)
            events += [Free(held.pop()) for _ in range(count)]
        else:
            size_bytes = step.size_bytes if isinstance(step, Held | Trial) else int(step)
            if size_bytes:
                born = number + len(events)
                events.append(Alloc(born, size_bytes, 0, Role.WORKSPACE, site, isinstance(step, Trial)))
                if isinstance(step, Held):
                    held.append(born)
                else:
                    events.append(Free(born))
    if blas_bytes:
        events.append(Alloc(number + len(events), blas_bytes, 0, Role.WORKSPACE, site))
    return [*events, *(Free(block) for block in reversed(held))]
