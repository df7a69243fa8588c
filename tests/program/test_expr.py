"""Numbers that remember, loops as they are stored, against the rules and loops that they stand for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from planner.capture.symbolic.builder import Loops
from planner.capture.symbolic.recast import differs
from planner.capture.symbolic.sym_int import Number, Record
from planner.capture.symbolic.sym_tensor import Sketch, ask
from planner.capture.symbolic.validate import Keeper
from planner.capture.workspaces.ops import Hold, Outputs
from planner.capture.workspaces.registry import RULES
from planner.jobs import Job, Mode, Precision
from planner.program.events import Trace
from planner.program.expr import Case, Guard, check_case, work_out
from planner.program.stored_loop import loop_from_json, loops_to_json
from planner.program.target import Target
from tests.helpers.models import job_of
from tests.helpers.structs import replace
from tests.program.test_specialize import Attending, on_meta, training

CHIPS = (Target((8, 6), 84), Target((8, 6), 28), Target((9, 0), 132), Target((7, 5), 40))

Program = list[tuple[str, int, int]]


def run_program(program: Program, start: Any, processors: Any) -> tuple[Any, ...]:
    """A rule made of arbitrary arithmetic and branches, on plain numbers or on those that remember."""
    values = [start, processors, 7]
    for letter, a, b in program:
        x, y = values[a % len(values)], values[b % len(values)]
        if letter == "+":
            values.append(x + y)
        elif letter == "-":
            values.append(x - y)
        elif letter == "*":
            values.append(x * (b % 50))
        elif letter == "/":
            values.append(-(-x // (1 + b % 9)))
        elif letter == "%":
            values.append(x % (1 + b % 9))
        elif letter == "min":
            values.append(min(x, y))
        elif letter == "max":
            values.append(max(x, y, 1))
        elif letter == "power":
            values.append(1 << (min(max(x, 1), 4096).bit_length() - 1))
        elif letter == "root":
            values.append(int(max(x, 1) % 1000**1) + int((x % 100) ** 0.5))
        elif letter == "if":
            values.append(x if x == y or x > 100 * b else y + 1)
    return tuple(Hold(size) for size in values[3:])


letters = st.sampled_from(["+", "-", "*", "/", "%", "min", "max", "power", "root", "if"])
programs = st.lists(st.tuples(letters, st.integers(0, 9), st.integers(0, 9)), max_size=9)


@given(programs, st.integers(2, 5000), st.lists(st.integers(2, 5000), min_size=5), st.integers(1, 200))
def test_a_case_says_what_the_rule_would_say_or_nothing(
    program: Program, batch: int, others: list[int], processors: int
) -> None:
    """At its own batch size always, at any other exactly or not at all, whatever the rule computes."""
    record = Record(batch)

    def rule(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Any, ...]:
        return run_program(program, args[0], chip.sm_count)

    case = ask(rule, (Number(record, 3 * batch + 1, (1, 3)),), None, Target((8, 6), processors), record)
    check_case(case)

    def plain(other: int, count: int) -> list[tuple[str, int]]:
        return [("h", held.size_bytes) for held in run_program(program, 3 * other + 1, count)]

    assert work_out(case, batch, processors) == plain(batch, processors)
    for other in others:
        for count in (processors, processors + 1):
            assert work_out(case, other, count) in (None, plain(other, count))


def test_a_line_holds_for_every_batch_size() -> None:
    """A rule without branches is asked once, and needs no comparison."""
    record = Record(4)
    sketch = Sketch([Number(record, 4, (0, 1)), 10], [10, 1], torch.float32)
    case = ask(
        lambda args, out, chip: (Outputs(), Hold(4 * args[0].numel())), (sketch,), None, CHIPS[0], record
    )
    assert case.guards == ()
    assert work_out(case, 1000, 84) == [("a", 0), ("h", 40_000)]


def test_what_no_rule_computes_is_not_worked_out() -> None:
    """A file cannot make a number grow without end, divide by nothing or shift out of memory."""
    square = tuple(("*", place, place) for place in range(60))
    growing = Case(1, 9, (("b", 0, 0), *square), (Guard("<", 0, 60, True),), ())
    dividing = Case(1, 9, (("b", 0, 0), ("c", 0, 0), ("/", 0, 1)), (Guard("<", 0, 2, True),), ())
    shifting = Case(1, 9, (("c", 1, 0), ("c", 2**40, 0), ("l", 0, 1)), (Guard("<", 2, 0, True),), ())
    for case in (growing, dividing, shifting):
        check_case(case)
        assert work_out(case, 5, 84) is None
    with pytest.raises(ValueError, match="before its operands"):
        check_case(Case(1, 9, (("+", 0, 1),), (), ()))


def stored(build: Callable[[], Any], job: Job, chip: Target) -> tuple[Loops, Any]:
    loops = Loops(job, on_meta(build), lambda line: None)
    return loops, Keeper(loops).loops(chip)[0]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_FP16])
def test_a_stored_loop_is_the_loop(precision: Precision) -> None:
    """At any batch size on any chip of its capability the same events, or none; and mostly some."""
    job = replace(training(), precision=precision)
    for chip in (CHIPS[0], CHIPS[2]):
        loops, loop = stored(Attending, job, chip)
        known = 0
        for batch in (2, 3, 5, 17, 64, 333, 1000, 4097):
            for count in (chip.sm_count, 28):
                found = loop.at(batch, count)
                if found is not None:
                    known += 1
                    assert differs(found, loops.at(batch, Target(chip.capability, count))) == ""
        assert known >= 15
        assert loop.at(1, chip.sm_count) is None
        assert loop.at(loop.last + 1, chip.sm_count) is None


def test_a_stored_run_is_the_run() -> None:
    """Of a batch size that no line goes through, for that batch size alone."""
    loops = Loops(training(), on_meta(Attending), lambda line: None)
    run = Keeper(loops).run(1, CHIPS[0])
    found = run.at(1, 84)
    assert found is not None
    assert differs(found, loops.run(1, CHIPS[0]).trace) == ""
    assert run.at(2, 84) is None


def test_loops_as_json() -> None:
    """Loops of two capabilities share what they have in common and come back whole."""
    job = job_of("3x64x64", mode=Mode.INFER, steps=1)
    loops = Loops(job, on_meta(Attending), lambda line: None)
    ampere, ada = (
        Keeper(loops).loops(Target.for_capability(capability))[0] for capability in ((8, 6), (8, 9))
    )
    said = loops_to_json({(8, 6): ampere, (8, 9): ada})
    assert loop_from_json(ampere.own, said, (8, 6)) == ampere
    assert loop_from_json(ada.own, said, (8, 9)) == ada
    with pytest.raises(KeyError):
        loop_from_json(ampere.own, said, (9, 0))


def test_broken_loops_are_refused() -> None:
    """Kernels out of order, of no kind, without a site, or answers that no kernel gives."""
    job = job_of("3x64x64", mode=Mode.INFER, steps=1)
    loops = Loops(job, on_meta(Attending), lambda line: None)
    loop = Keeper(loops).loops(CHIPS[0])[0]

    def breaks(change: Callable[[dict[str, Any]], None]) -> None:
        said = loops_to_json({(8, 6): loop})
        change(said)
        with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
            loop_from_json(loop.own, said, (8, 6))

    breaks(lambda said: said["kernels"]["kind"].__setitem__(0, 10**6))
    breaks(lambda said: said["kernels"]["site"].__setitem__(0, -1))
    breaks(lambda said: said["kernels"]["before"].__setitem__(1, -5))
    breaks(lambda said: said["kernels"]["before"].__setitem__(0, 2**62))
    breaks(lambda said: said["kernels"].pop("site"))
    breaks(lambda said: said["pool"].__setitem__(0, [1, 2, "+", [0], [0], "", [], "", []]))
    breaks(lambda said: said["chips"]["8.6"].__setitem__("first", "2"))
    assert isinstance(loop.own, Trace)


def test_a_rule_that_only_a_run_can_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rule looks at what no sketch has, a loop answers nothing, and each batch size is run."""

    def rule(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Any, ...]:
        return (Hold(512 + args[0].storage_offset()),)

    monkeypatch.setitem(RULES, torch.ops.aten.convolution.default, rule)
    loops, loop = stored(Attending, training(), CHIPS[0])
    assert loop.at(2, 84) is None
    found = Keeper(loops).run(2, CHIPS[0]).at(2, 84)
    assert found is not None
    assert differs(found, loops.run(2, CHIPS[0]).trace) == ""
