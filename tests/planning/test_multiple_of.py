"""--multiple-of: the largest batch that is a multiple of a number."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import planner
from planner.cli import run
from planner.errors import UsageError
from planner.jobs import Job
from planner.planning.search.boundary import largest, round_down
from planner.planning.search.max_batch import find_max_batch
from planner.program.batch_sizes import BatchSizes
from planner.program.events import Category, Outcome, Trace
from planner.program.program import AffineAlloc, Program
from planner.program.target import Target
from tests.helpers.traces import OneProgram, program_of
from tests.planning.test_max_batch import budget_of

JOB: dict[str, Any] = {"gpu": "L4"}


def fits_up_to(most: int, comfortable: int, *holes: int) -> Callable[[int], Outcome]:
    def outcome(batch: int) -> Outcome:
        if batch > most or batch in holes:
            return Outcome.DOES_NOT_FIT
        return Outcome.FITS if batch <= comfortable else Outcome.FITS_WITH_RETRIES

    return outcome


@pytest.mark.parametrize(
    ("most", "comfortable", "multiple", "answer"),
    [(705, 600, 8, (704, 600)), (705, 599, 8, (704, 592)), (40, 40, 64, (0, 0)), (64, 3, 64, (64, 0))],
)
def test_answers_are_rounded_down(
    most: int, comfortable: int, multiple: int, answer: tuple[int, int]
) -> None:
    """Both answers become multiples, 0 where none fits; the first failure is of any size."""
    outcome = fits_up_to(most, comfortable)
    search = round_down(largest(outcome), multiple, outcome)
    assert (search.largest, search.comfortable) == answer
    assert search.first_failure == most + 1


def test_a_multiple_that_does_not_fit_is_passed_over() -> None:
    """If the allocator has holes below the largest, the answer is the next multiple that fits."""
    outcome = fits_up_to(100, 100, 96, 88)
    search = round_down(largest(outcome), 8, outcome)
    assert search.largest == 80
    assert (96, Outcome.DOES_NOT_FIT) in search.probes


def test_max_batch_and_gpus_agree() -> None:
    """The command's answer is the multiple next below the one without it, and so is that of the table."""
    any_size = planner.max_batch("conv_pair", **JOB)
    free, at_ease = any_size.max_batch, any_size.comfortable_batch
    result = planner.max_batch("conv_pair", **JOB, multiple_of=64)
    assert result.max_batch == free - free % 64
    assert (result.to_dict()["multiple_of"], result.to_dict()["at_max"]["batch"]) == (64, result.max_batch)
    which = f"{at_ease} fits without retries, {free} with" if at_ease < free else f"{free} fits"
    assert f"Multiple of:    64; of any size, {which}" in str(result)
    table = planner.gpus("conv_pair", filter="L4", multiple_of=64).to_dict()
    assert {row["gpu"]: row["max_batch"] for row in table["rows"]}["L4 24GB"] == result.max_batch
    assert table["multiple_of"] == 64


def test_none_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """If no multiple fits, the answer is no, with the largest batch of any size."""
    command = ["max-batch", "--model", "resnet50", "--gpu", "L4", "--multiple-of", "4096"]
    assert run(command) == 1
    assert "none at confidence 0.99 that is a multiple of 4096" in capsys.readouterr().out
    assert run([*command, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["max_batch"] == 0


@pytest.mark.parametrize("text", ["0", "x", "-8"])
def test_no_number_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A multiple is a whole number from 1."""
    assert run(["max-batch", "--model", "conv_pair", "--gpu", "L4", "--multiple-of", text]) == 2
    assert capsys.readouterr().err.startswith("planner: --multiple-of")


def test_the_formula_has_none() -> None:
    """The closed formula refuses what it does not answer."""
    with pytest.raises(UsageError, match="--multiple-of and --method formula"):
        planner.max_batch("vgg16_bn", **JOB, method="formula", multiple_of=8)


@dataclass
class InFours(OneProgram):
    """A job that takes multiples of four from eight on, a mebibyte for each sample."""

    program: Program
    trace_count: int = 0

    def trace(self, batch: int, target: Target) -> Trace:
        assert batch % 4 == 0
        assert batch >= 8
        return super().trace(batch, target)

    def batch_sizes(self, target: Target) -> BatchSizes:
        return BatchSizes(8, 4)


@pytest.mark.parametrize(("room_mib", "multiple", "answer"), [(403, 1, 400), (403, 6, 396), (7, 1, 0)])
def test_a_job_that_takes_multiples_gets_them(room_mib: int, multiple: int, answer: int) -> None:
    """The answer is a multiple of both numbers, and no other batch size is traced."""
    programs = InFours(program_of((AffineAlloc(0, 0, 2**20, Category.ACTIVATION, 0),)))
    plan = find_max_batch(Job.create("made up"), budget_of(room_mib), programs, multiple)
    assert plan.search.largest == answer
    assert all(batch % 4 == 0 for batch, _ in plan.search.probes)
