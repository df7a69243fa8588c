"""The same loop at another batch size or on another GPU without running it once more.

Two runs of a model at different batch sizes tell, for everything that the model itself allocates, a straight
line in the batch size. What kernels take beside it is a step function of shapes and of the GPU, but the rules
of `scratch/` know it from the shapes alone: so the runs note each call of an operator that has a rule, with
the shapes of its tensors (`calls`), and for any batch size and GPU the rules are asked again. That gives the
trace that a run would have given, in a hundredth of its time, as long as the model takes the same path;
`differs` tells whether a run did. `two_runs` makes a loop of runs.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner.capture.symbolic.kernel_calls import Kind, thaw
from planner.capture.workspaces.ops import letter_of
from planner.capture.workspaces.registry import rule_of
from planner.program import (
    Alloc,
    Event,
    Free,
    Phase,
    PhaseStart,
    Target,
    Trace,
    Written,
    kernel_events,
    workspace_bytes,
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A call of the loop."""

    key: tuple[int, int]  # the two below
    kind: int  # of the distinct calls
    site: int  # of the blocks of its kernel
    before: int  # so many of the loop's own events come before it
    outputs: tuple[bool, ...]  # whether the next of them is the birth of its output, for each output
    births: int  # so many outputs take memory
    takes_blas: bool  # cuBLAS takes its workspace here


# What kernels do, by their keys, and its events where they come after all outputs.
_Known = dict[tuple[int, int], tuple[Written, list[Event] | None]]


@dataclass(frozen=True, slots=True)
class Loop:
    """The loop at any batch size on any GPU on which the model takes the same path."""

    trace: Trace  # of the first run: its notes, sites, unknown operators
    own: tuple[Event, ...]  # events of the loop without its kernels' scratch memory, affine in the batch size
    kernels: tuple[Kernel, ...]
    kinds: tuple[Kind, ...]
    first_number: int  # of blocks that are not in `own`
    second_step: int  # so many events of `own` come before it
    asked: dict[tuple[int, int, Target], Written]  # what the rules have said already
    passed: dict[tuple[int, int], tuple[Any, Any]] = field(default_factory=dict)  # to them, at one batch size
    placed: dict[tuple[int, Written, int], list[Event]] = field(default_factory=dict)  # of each kernel
    cublas_config: str = ""  # the text of CUBLAS_WORKSPACE_CONFIG

    def at(self, batch: int, chip: Target) -> Trace:
        """The trace that a run at this batch size on such a GPU would give. Blocks have other numbers, and
        those of scratch memory come again when they are free.
        """
        return self._splice(batch, chip, len(self.own))

    def opening_at(self, batch: int, chip: Target) -> Trace:
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

    def answers(self, batch: int, chip: Target) -> tuple[Hashable, ...]:
        """All that can differ between GPUs at a batch size: what the kernels take."""
        steps = (self._steps(kind, batch, chip) for kind in range(len(self.kinds)))
        return workspace_bytes(chip.capability, self.cublas_config), *steps

    def _splice(self, batch: int, chip: Target, stop: int) -> Trace:
        events: list[Event] = []
        done, own = 0, self.own
        first: _Known = {}
        later: _Known = {}
        started: set[int] = set()  # kinds that ran before
        for place, kernel in enumerate(self.kernels):
            kind, before, births, takes_blas = kernel.kind, kernel.before, kernel.births, kernel.takes_blas
            if before >= stop:
                break
            known, taken = (later, _later) if kind in started else (first, _first)
            started.add(kind)
            if kernel.key not in known:
                steps = taken(self._steps(kind, batch, chip))
                simple = _comes_after(steps, kernel.outputs)
                made = kernel_events(steps, (), 0, kernel.site, self.first_number) if simple else None
                known[kernel.key] = steps, made
            steps, scratch = known[kernel.key]
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
            events += self._placed(place, steps, blas_bytes)
        events += own[done:stop]
        return replace(self.trace, events=tuple(events), batches=(batch,), details=())

    def _placed(self, place: int, steps: Written, blas_bytes: int) -> list[Event]:
        """The events of a kernel with its outputs among them, all else being the same at any batch."""
        key = (place, steps, blas_bytes)
        found = self.placed.get(key)
        if found is None:
            kernel = self.kernels[place]
            made = iter(self.own[kernel.before : kernel.before + kernel.births])
            outputs = [[next(made)] if takes else [] for takes in kernel.outputs]
            # cuBLAS's stays: it gets a number that no scratch memory has
            number = self.first_number + (1000 * (1 + kernel.before) if kernel.takes_blas else 0)
            found = self.placed[key] = kernel_events(steps, outputs, blas_bytes, kernel.site, number)
        return found

    def _steps(self, kind: int, batch: int, chip: Target) -> Written:
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
                    self.passed[kind, batch] = thaw(args, batch), thaw(out, batch)
                steps = rule(*self.passed[kind, batch], chip)
                found = tuple((letter, int(size)) for letter, size in map(letter_of, steps))
            self.asked[key] = found
        return found


def opening_end(events: Sequence[Event]) -> int:
    """So many events come before the second step, or the end."""
    marks = ((index, event) for index, event in enumerate(events) if isinstance(event, PhaseStart))
    later = (index for index, mark in marks if mark.step > 1 or mark.phase is Phase.END)
    return next(later, len(events))


def differs(one: Trace, other: Trace) -> str:
    """Where two traces of one batch size differ apart from the numbers of blocks; "" where they do not."""
    (batch,) = one.batches
    numbers: dict[int, int] = {}
    for index, (a, b) in enumerate(zip(one.events, other.events, strict=False)):
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            same = a.bytes_at(batch) == b.bytes_at(batch) and (a.role, a.optional) == (b.role, b.optional)
            same = same and one.sites[a.site] == other.sites[b.site]
            numbers[a.block] = b.block
        elif isinstance(a, Free) and isinstance(b, Free):
            same = numbers.get(a.block) == b.block
        else:
            same = isinstance(a, PhaseStart) and a == b
        if not same:
            return f"event {index} at batch {batch}"
    return "" if len(one.events) == len(other.events) else f"the number of events at batch {batch}"


def _first(steps: Written) -> Written:
    """With each search as a trial, as the first call of a kind makes it."""
    return tuple(("t" if letter == "s" else letter, size) for letter, size in steps)


def _later(steps: Written) -> Written:
    """Without searches."""
    return tuple(step for step in steps if step[0] != "s")


def _comes_after(steps: Written, outputs: tuple[bool, ...]) -> bool:
    """Whether the kernel takes its scratch memory once all its outputs are made, or has neither."""
    letters = [letter for letter, _ in steps]
    if "o" in letters:
        return False
    return "a" not in letters or letters[0] == "a" or not any(outputs)
