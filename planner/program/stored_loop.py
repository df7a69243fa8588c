"""A loop of a model for any batch size, in a form that a file holds and that needs no torch.

`trace/two_runs.py` takes a loop apart into the model's own events, straight lines in the batch size, and
calls of kernels, whose rules say what they take beside it. Here the rules' answers stand as `terms.Case`s.
Both are put together again exactly as a run would record them, or not at all.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from planner.program.events import Alloc, Category, Event, Free, Trace
from planner.program.expr import Answer, Case, Guard, check_case, work_out

# Passing block, one that the kernel does without where it is refused, held block, next output, all outputs
# left, release all, release some, release some beneath the last.
LETTERS = "pthoaerb"
# Of a loop from a file, so that a trace is made of it in seconds: what its kernels do, and terms that are
# worked out. BERT's three steps are some 10**4 of the first, and 500 of the second.
MOST_EVENTS = 2**24
MOST_TERMS = 2**20

Capability = tuple[int, int]
Written = tuple[tuple[str, int], ...]  # what a kernel does, step by step: letters and sizes
Answers = tuple[Written, ...]  # for each kind of call


@dataclass(frozen=True, slots=True)
class Kernel:
    """A call of an operator that has a rule, or the one for which cuBLAS takes its workspace."""

    kind: int  # index into the cases
    site: int
    before: int  # so many of the loop's own events come before it
    outputs: tuple[bool, ...]  # whether the next of them is the birth of its output, for each output
    takes_blas: bool


@dataclass(frozen=True, slots=True)
class StoredLoop:
    """The loop on GPUs of one compute capability."""

    own: Trace  # affine: the loop without what kernels take beside it
    kernels: tuple[Kernel, ...]
    cases: tuple[tuple[Case, ...], ...]  # for each kind of call
    blas_bytes: int  # what cuBLAS keeps for each thread
    first: int  # the batch sizes for which it holds: from this one
    last: int  # to this one, at which a run did the same

    def at(self, batch: int, multiprocessors: int) -> Trace | None:
        """The trace that a run at this batch size would give, where that is known for sure."""
        answers = self.answers(batch, multiprocessors)
        return None if answers is None else self.told(batch, answers)

    def told(self, batch: int, answers: Answers) -> Trace:
        """The trace at a batch size at which the kernels take this."""
        return replace(self.own, events=tuple(self._spliced(batch, answers)), batches=(batch,))

    def answers(self, batch: int, multiprocessors: int) -> Answers | None:
        """What the kernels take at this batch size, where that is known for sure."""
        if not self.first <= batch <= self.last:
            return None
        answers = []
        for cases in self.cases:
            found = written(cases, batch, multiprocessors)
            if found is None:
                return None
            answers.append(found)
        return tuple(answers)

    def _spliced(self, batch: int, answers: Answers) -> list[Event]:
        events: list[Event] = []
        own = [_at(event, batch) for event in self.own.events]
        number = 1 + max((event.block for event in own if isinstance(event, Alloc)), default=-1)
        done = 0
        for kernel in self.kernels:
            steps = answers[kernel.kind]
            blas_bytes = self.blas_bytes if kernel.takes_blas else 0
            if not steps and not blas_bytes:
                continue
            events += own[done : kernel.before]
            done = kernel.before + sum(kernel.outputs)
            births = iter(own[kernel.before : done])
            outputs = [[next(births)] if takes else [] for takes in kernel.outputs]
            made = kernel_events(steps, outputs, blas_bytes, kernel.site, number)
            number += len(made)
            events += made
        return events + own[done:]


def _at(event: Event, batch: int) -> Event:
    if not isinstance(event, Alloc) or not event.per_sample_bytes:
        return event
    size_bytes = event.fixed_bytes + event.per_sample_bytes * batch
    return Alloc(event.block, size_bytes, 0, event.role, event.site, event.optional)


def written(cases: Sequence[Case], batch: int, multiprocessors: int) -> Written | None:
    """What a kind of call takes, by the first of its cases that answers."""
    found = (work_out(case, batch, multiprocessors) for case in cases)
    return next((tuple(steps) for steps in found if steps is not None), None)


def tried(first: int, last: int) -> Iterator[int]:
    """The batch sizes at which the rules were asked: each up to 16, then eight for each doubling."""
    batch = first
    while batch < last:
        yield batch
        batch += max(1, batch // 8)
    yield last


def kernel_events(
    steps: Written, outputs: Sequence[list[Event]], blas_bytes: int, site: int, number: int
) -> list[Event]:
    """The events of one kernel, as `Recorder._note_kernel` records them; new blocks are numbered from
    `number`, at most one for each event. `outputs` are the births of each, none where it takes no memory.
    """
    events: list[Event] = []
    held: list[int] = []
    coming = iter(outputs)
    if not any(letter in "oa" for letter, _ in steps):
        steps = (("a", 0), *steps)
    for letter, size in (*steps, ("a", 0)):
        if letter == "o":
            events += next(coming, [])
        elif letter == "a":
            for output in coming:
                events += output
        elif letter in "er":
            events += [Free(held.pop()) for _ in range(min(size, len(held)) if letter == "r" else len(held))]
        elif letter == "b":
            events += [Free(block) for block in reversed(held[-1 - size : -1])]
            del held[-1 - size : -1]
        elif size > 0:
            block = number + len(events)
            events.append(Alloc(block, size, 0, Category.WORKSPACE, site, letter == "t"))
            if letter == "h":
                held.append(block)
            else:
                events.append(Free(block))
    if blas_bytes:
        events.append(Alloc(number + len(events), blas_bytes, 0, Category.WORKSPACE, site))
    return [*events, *(Free(block) for block in reversed(held))]


# ---- as JSON, beside the affine trace of a trace file


def loops_to_json(loops: Mapping[Capability, StoredLoop]) -> dict[str, Any]:
    """All but `own` of loops that differ in their cases only; `loop_from_json` finds each again."""
    kernels = next(iter(loops.values())).kernels
    shapes = sorted({kernel.outputs for kernel in kernels})
    pool: dict[str, int] = {}
    chips = {
        _named(capability): {
            "blas_bytes": loop.blas_bytes,
            "first": loop.first,
            "last": loop.last,
            "cases": [[_pooled(pool, case) for case in cases] for cases in loop.cases],
        }
        for capability, loop in loops.items()
    }
    return {
        "outputs": ["".join("01"[takes] for takes in shape) for shape in shapes],
        "kernels": {
            "kind": [kernel.kind for kernel in kernels],
            "site": [kernel.site for kernel in kernels],
            "before": _differences([kernel.before for kernel in kernels]),
            "outputs": [shapes.index(kernel.outputs) for kernel in kernels],
            "takes_blas": [place for place, kernel in enumerate(kernels) if kernel.takes_blas],
        },
        "pool": [json.loads(text) for text in pool],
        "chips": chips,
    }


def loop_from_json(own: Trace, said: Mapping[str, Any], capability: Capability) -> StoredLoop:
    """The loop for such GPUs that `loops_to_json` described, around its own events.

    Raises LookupError, TypeError, ValueError or AttributeError where `said` is nothing that it wrote.
    """
    columns = _whole(said["kernels"], ("kind", "site", "before", "outputs", "takes_blas"))
    chip = _whole(said["chips"][_named(capability)], ("blas_bytes", "first", "last", "cases"))
    outputs = [_shape(text) for text in said["outputs"]]
    takes_blas = set(_numbers(columns["takes_blas"]))
    before = accumulate(_numbers(columns["before"]))
    rows = zip(
        _numbers(columns["kind"]),
        _numbers(columns["site"]),
        before,
        _numbers(columns["outputs"]),
        strict=True,
    )
    kernels = tuple(
        Kernel(kind, site, place, _picked(outputs, shape), number in takes_blas)
        for number, (kind, site, place, shape) in enumerate(rows)
    )
    pool, known = said["pool"], dict[int, Case]()
    for number in {number for numbers in chip["cases"] for number in _numbers(numbers)}:
        known[number] = _case_from_json(_picked(pool, number))
    cases = tuple(tuple(known[number] for number in numbers) for numbers in chip["cases"])
    loop = StoredLoop(own, kernels, cases, *_numbers([chip["blas_bytes"], chip["first"], chip["last"]]))
    for case in known.values():
        _check_case(case)
    _check(loop)
    return loop


def _whole(said: Any, keys: Sequence[str]) -> dict[str, Any]:
    if not isinstance(said, dict) or said.keys() != set(keys):
        raise ValueError(f"no mapping of {', '.join(keys)}")
    return said


def _shape(text: Any) -> tuple[bool, ...]:
    if not isinstance(text, str) or not set(text) <= set("01"):
        raise ValueError("outputs are written with 0 and 1")
    return tuple(letter == "1" for letter in text)


def _picked(values: Sequence[Any], number: int) -> Any:
    if number < 0:
        raise IndexError(f"place {number}")
    return values[number]


def _named(capability: Capability) -> str:
    return ".".join(map(str, capability))


def _pooled(pool: dict[str, int], case: Case) -> int:
    return pool.setdefault(json.dumps(_case_to_json(case)), len(pool))


def _check(loop: StoredLoop) -> None:
    if loop.blas_bytes < 0 or not 1 <= loop.first <= loop.last:
        raise ValueError(f"batch sizes from {loop.first} to {loop.last}, {loop.blas_bytes} bytes for cuBLAS")
    terms = sum(len(case.nodes) + len(case.guards) + 1 for cases in loop.cases for case in cases)
    if terms > MOST_TERMS:
        raise ValueError(f"{terms} terms, which nobody works out in time")
    events, done = loop.own.events, 0
    steps = [max((len(case.answers) for case in cases), default=0) for cases in loop.cases]
    made = 0
    for kernel in loop.kernels:
        if not (0 <= kernel.kind < len(loop.cases) and 0 <= kernel.site < len(loop.own.sites)):
            raise ValueError("a kernel of no kind or without a site")
        made += 2 * steps[kernel.kind] + len(kernel.outputs) + 2
        if made > MOST_EVENTS:
            raise ValueError(f"more than {MOST_EVENTS} events of kernels")
        end = kernel.before + sum(kernel.outputs)
        if not done <= kernel.before <= end <= len(events):
            raise ValueError("kernels out of order")
        if not all(isinstance(event, Alloc) for event in events[kernel.before : end]):
            raise ValueError("a kernel's output is no block")
        done = end


def _check_case(case: Case) -> None:
    check_case(case)
    if not all(answer.letter in LETTERS for answer in case.answers):
        raise ValueError("a kernel does what no kernel does")


def _case_to_json(case: Case) -> list[Any]:
    nodes, guards = case.nodes, case.guards
    return [
        *(case.low, case.high, "".join(node[0] for node in nodes)),
        *([node[1] for node in nodes], [node[2] for node in nodes]),
        "".join(guard.comparison for guard in guards),
        [number for guard in guards for number in (guard.left, guard.right, int(guard.holds))],
        "".join(answer.letter for answer in case.answers),
        [answer.term for answer in case.answers],
    ]


def _case_from_json(said: Any) -> Case:
    low, high, operations, lefts, rights, comparisons, compared, letters, terms = said
    if not all(isinstance(text, str) for text in (operations, comparisons, letters)):
        raise TypeError("operations, comparisons and steps are letters")
    places = _numbers(compared)
    triples = zip(places[::3], places[1::3], places[2::3], strict=True)
    guards = tuple(
        Guard(letter, left, right, holds == 1)
        for letter, (left, right, holds) in zip(comparisons, triples, strict=True)
    )
    answers = tuple(Answer(letter, term) for letter, term in zip(letters, _numbers(terms), strict=True))
    low, high = _numbers([low, high])
    nodes = tuple(zip(operations, _numbers(lefts), _numbers(rights), strict=True))
    return Case(low, high, nodes, guards, answers)


def _differences(numbers: Sequence[int]) -> list[int]:
    return [number - before for number, before in zip(numbers, (0, *numbers), strict=False)]


def _numbers(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and abs(value) < 2**63 for value in values):
        raise TypeError("whole numbers are wanted")
    return values
