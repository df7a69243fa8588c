"""A trace as a sequence of steps that becomes periodic: set-up, first steps, and a repeating step.

The actions of a step name blocks relative to it ("the third block of the step before"), so that a step can be
played any number of times and two steps can be compared.
"""

from msgspec import Struct
from msgspec.structs import replace

from planner.program.events import Category, Free, Phase, PhaseStart, Trace


class Malloc(Struct, frozen=True):
    """The allocation of a block. The blocks of each step are numbered from 0."""

    size_bytes: int
    category: Category
    optional: bool = False  # if it fails, the process continues without it
    stream: int = 0


class Dealloc(Struct, frozen=True):
    """The freeing of a block, which is named by the age of its step and its number there."""

    age: int  # 0: allocated in this step, 1: in the step before, ...
    number: int  # among the blocks of that step
    empties_cache: bool = False


class Retain(Struct, frozen=True):
    """The allocation of memory that a library such as cuBLAS keeps for the rest of the process."""

    size_bytes: int
    stream: int = 0


Action = Malloc | Dealloc | Retain | Phase  # a Phase: its beginning


class StepSequence(Struct, frozen=True):
    """The steps of a loop at one batch size."""

    setup: tuple[Action, ...]  # placing the weights and creating the optimizer; counts as step 0
    steps: tuple[tuple[Action, ...], ...]  # the traced steps, step 1 first

    @property
    def is_periodic(self) -> bool:
        """Return whether the last two steps are equal, so that all later steps are assumed to be."""
        return len(self.steps) > 1 and self.steps[-1] == self.steps[-2]

    def step(self, number: int) -> tuple[Action, ...]:
        """Return the actions of a step; 0 is the set-up, and steps beyond the traced steps repeat the last.

        Raises ValueError for a step beyond the traced steps if the sequence is not periodic.
        """
        if number == 0:
            return self.setup
        if number > len(self.steps) and not self.is_periodic:
            raise ValueError(f"step {number}: {len(self.steps)} steps are traced, and the last two differ")
        return self.steps[min(number, len(self.steps)) - 1]


def split_steps(trace: Trace) -> StepSequence:
    """Split a trace into its steps, without the phase that marks its end.

    Workspaces that are never freed count as memory for the rest of the process.
    """
    freed = {event.block for event in trace.events if isinstance(event, Free)}
    born: dict[int, tuple[int, int]] = {}  # the step of a block and its number in it
    steps: list[list[Action]] = [[]]
    position = 0
    for event in trace.events:
        now = len(steps) - 1
        if isinstance(event, PhaseStart):
            if event.step > now:
                steps.append([])
                position = 0
            if event.phase is not Phase.END:
                steps[-1].append(event.phase)
        elif isinstance(event, Free):
            step, number = born[event.block]
            steps[-1].append(Dealloc(now - step, number, event.empties_cache))
        else:
            size_bytes = event.size_bytes
            if event.category is Category.WORKSPACE and event.block not in freed:
                steps[-1].append(Retain(size_bytes, event.stream))
                continue
            born[event.block] = (now, position)
            position += 1
            steps[-1].append(Malloc(size_bytes, event.category, event.may_fail, event.stream))
    return StepSequence(tuple(steps[0]), tuple(map(tuple, steps[1:])))


def first_step(trace: Trace) -> Trace:
    """Return the trace up to the start of the second step, or to the end if there is none."""
    starts = ((index, event) for index, event in enumerate(trace.events) if isinstance(event, PhaseStart))
    ends = (index for index, start in starts if start.step > 1 or start.phase is Phase.END)
    return replace(trace, events=trace.events[: next(ends, len(trace.events))])
