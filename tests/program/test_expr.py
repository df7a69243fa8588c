"""Numbers that remember, loops as they are stored, against the rules and loops that they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from planner.capture.session import record
from planner.capture.symbolic.builder import ProgramBuilder
from planner.capture.symbolic.sym_int import ShapeEnv, SymInt
from planner.capture.symbolic.sym_tensor import SymTensor, trace_rule
from planner.capture.workspaces.ops import Hold, Outputs
from planner.capture.workspaces.registry import RULES
from planner.jobs import Job, Mode, Precision
from planner.program import ignore_progress
from planner.program.diff import first_divergence
from planner.program.expr import Guard, GuardedOps, evaluate, validate_ops
from planner.program.program import Program
from planner.program.target import Target
from planner.store.codec import load_programs, save_programs
from tests.helpers.models import job_of
from tests.helpers.structs import replace
from tests.program.test_specialize import Attending, on_meta, training

CHIPS = (Target((8, 6), 84), Target((8, 6), 28), Target((9, 0), 132), Target((7, 5), 40))

Steps = list[tuple[str, int, int]]


def run_program(program: Steps, start: Any, processors: Any) -> tuple[Any, ...]:
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
    program: Steps, batch: int, others: list[int], processors: int
) -> None:
    """A case holds at its own batch size, and at any other exactly or not at all, for any rule."""
    env = ShapeEnv(batch)

    def rule(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Any, ...]:
        return run_program(program, args[0], chip.sm_count)

    case = trace_rule(rule, (SymInt(env, 3 * batch + 1, (1, 3)),), None, Target((8, 6), processors), env)
    validate_ops(case)

    def plain(other: int, count: int) -> tuple[tuple[str, int], ...]:
        return tuple(("h", held.number) for held in run_program(program, 3 * other + 1, count))

    assert evaluate(case, batch, processors) == plain(batch, processors)
    for other in others:
        for count in (processors, processors + 1):
            assert evaluate(case, other, count) in (None, plain(other, count))


@pytest.mark.parametrize("name", ["index.Tensor", "index_put.default"])
def test_rules_of_indices_are_followed(name: str) -> None:
    """A rule asks whether an index is on the CPU, which tensors with symbolic sizes are not."""
    env = ShapeEnv(4)
    batch = SymInt(env, 4, (0, 1))
    x = SymTensor([batch, 10], [10, 1], torch.float32)
    rows = SymTensor([batch], [1], torch.int64)
    chosen = SymTensor([batch, 10], [10, 1], torch.float32)
    packet, _, overload = name.partition(".")
    rule = RULES[getattr(getattr(torch.ops.aten, packet), overload)]
    args = (x, [rows], chosen, True)[: 2 if packet == "index" else 4]
    assert trace_rule(rule, args, chosen, CHIPS[0], env).min_batch <= 4


def test_a_line_holds_for_every_batch_size() -> None:
    """A rule without branches is run once, and needs no comparison."""
    env = ShapeEnv(4)
    tensor = SymTensor([SymInt(env, 4, (0, 1)), 10], [10, 1], torch.float32)
    case = trace_rule(
        lambda args, out, chip: (Outputs(), Hold(4 * args[0].numel())), (tensor,), None, CHIPS[0], env
    )
    assert case.guards == ()
    assert evaluate(case, 1000, 84) == (("a", 0), ("h", 40_000))


def test_what_no_rule_computes_is_not_worked_out() -> None:
    """A file cannot make a number grow without end, divide by nothing or shift out of memory."""
    square = tuple(("*", place, place) for place in range(60))
    growing = GuardedOps(1, 9, (("b", 0, 0), *square), (Guard("<", 0, 60, True),), ())
    dividing = GuardedOps(1, 9, (("b", 0, 0), ("c", 0, 0), ("/", 0, 1)), (Guard("<", 0, 2, True),), ())
    shifting = GuardedOps(1, 9, (("c", 1, 0), ("c", 2**40, 0), ("l", 0, 1)), (Guard("<", 2, 0, True),), ())
    for case in (growing, dividing, shifting):
        validate_ops(case)
        assert evaluate(case, 5, 84) is None
    with pytest.raises(ValueError, match="precedes its operands"):
        validate_ops(GuardedOps(1, 9, (("+", 0, 1),), (), ()))


def stored(build: Callable[[], Any], job: Job, target: Target) -> tuple[ProgramBuilder, Program]:
    """The program as a file has it, which cannot evaluate rules."""
    builder = ProgramBuilder(job, on_meta(build), ignore_progress)
    program = builder.programs(target)[0]
    builder.enumerate_variants(program, target)
    return builder, replace(program, rules=None)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_FP16])
def test_a_stored_program_is_the_program(precision: Precision) -> None:
    """A stored program has, at any batch size on any GPU of its capability, the same events or none."""
    job = training().replace(precision=precision)
    for target in (CHIPS[0], CHIPS[2]):
        builder, program = stored(Attending, job, target)
        (whole,) = builder.programs(target)
        known = 0
        for batch in (2, 3, 5, 17, 64, 333, 1000, 4097):
            for count in (target.sm_count, 28):
                gpu = Target(target.capability, count)
                trace, expected = program.specialize(batch, gpu), whole.specialize(batch, gpu)
                if trace is not None:
                    known += 1
                    assert expected is not None and first_divergence(trace, expected) == ""
        assert known >= 15
        assert program.specialize(1, target) is None
        assert program.specialize(program.targets[target.capability].max_batch + 1, target) is None


def test_a_stored_run_is_the_run() -> None:
    """A run of a batch size that no program covers is stored for that batch size alone."""
    builder = ProgramBuilder(training(), on_meta(Attending), ignore_progress)
    run = builder.run(1, CHIPS[0])
    builder.enumerate_variants(run, CHIPS[0])
    trace = replace(run, rules=None).specialize(1, CHIPS[0])
    assert trace is not None
    assert first_divergence(trace, record(training(), 1, (8, 6), on_meta(Attending), sm_count=84)) == ""
    assert run.specialize(2, CHIPS[0]) is None


def test_programs_in_a_file(tmp_path: Path) -> None:
    """A program for two capabilities comes back whole, each capability when it is loaded."""
    job = job_of("3x64x64", mode=Mode.INFER, steps=1)
    builder = ProgramBuilder(job, on_meta(Attending), ignore_progress)
    targets = [Target.for_capability(capability) for capability in ((8, 6), (8, 9))]
    programs = {id(program): program for target in targets for program in builder.programs(target)}
    (program,) = programs.values()
    for target in targets:
        builder.enumerate_variants(program, target)
    save_programs([program], tmp_path / "p", {})
    (encoded,) = load_programs(tmp_path / "p").programs
    assert all(encoded.load_target(target.capability) for target in targets)
    assert encoded.program == program
    assert not encoded.load_target((9, 0))


def test_a_rule_that_symbols_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rule looks at what no symbolic tensor has, a stored program covers nothing that was not run."""

    def rule(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Any, ...]:
        return (Hold(512 + args[0].storage_offset()),)

    monkeypatch.setitem(RULES, torch.ops.aten.convolution.default, rule)
    builder, program = stored(Attending, training(), CHIPS[0])
    assert program.specialize(7, CHIPS[0]) is None
    trace = builder.programs(CHIPS[0])[0].specialize(7, CHIPS[0])
    assert trace is not None
    assert first_divergence(trace, record(training(), 7, (8, 6), on_meta(Attending), sm_count=84)) == ""
