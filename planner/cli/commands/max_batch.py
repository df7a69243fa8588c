"""`planner max-batch`."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from planner.api import DEFAULT_CONFIDENCE
from planner.cli.declared import MultipleOf
from planner.cli.options import (
    CalibrationOptions,
    CardOptions,
    JobOptions,
    MethodOptions,
    OutputOptions,
    Text,
    takes,
    whole,
)
from planner.cli.output import answer, answering_first, working, working_for_minutes
from planner.cli.words import Argument, Option
from planner.errors import UsageError
from planner.report import Result

if TYPE_CHECKING:
    from planner.planning.command import CommandPlan


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Which batch sizes may be the answer."""

    multiple_of: MultipleOf = None
    no_retries: Annotated[
        bool,
        Option("--no-retries", help="Exit code 0 only for a batch that runs without allocator retries."),
    ] = False
    gpus: Annotated[
        Text, Option(metavar="N", help="With a command: how many emulated GPUs it sees; 1 by default.")
    ] = None
    command: Annotated[
        list[str] | None,
        Argument(
            metavar="-- COMMAND...",
            help="A training script in place of --model, run on emulated GPUs; {batch} is its batch size.",
        ),
    ] = None


@takes(JobOptions, CardOptions, AnswerOptions, CalibrationOptions, MethodOptions, OutputOptions)
def max_batch_command(
    job: JobOptions,
    card: CardOptions,
    chosen: AnswerOptions,
    stored: CalibrationOptions,
    how: MethodOptions,
    output: OutputOptions,
) -> int:
    """Find the largest batch of a model that fits a GPU."""
    from planner import max_batch

    if chosen.command:
        _refuse_beside_command(job, card, stored, how)
        return _plan_command(chosen.command, card, chosen, output)
    if chosen.gpus is not None:
        raise UsageError("--gpus is for a command behind --; a model is planned for one GPU")
    options = job.keywords() | card.keywords() | stored.keywords()
    multiple_of = whole("--multiple-of", chosen.multiple_of, "8")
    with answering_first(partial(answer, output=output)), working() as tell:
        result = max_batch(
            method=how.method,
            multiple_of=multiple_of,
            no_retries=chosen.no_retries,
            **options,
            tell=tell,
        )
    answer(result, output)
    return 0 if result.answer_batch else 1


@dataclass(frozen=True, slots=True)
class CommandResult(Result):
    """The largest batch size of a command; `str` gives the text report."""

    plan: "CommandPlan"


def _plan_command(command: list[str], card: CardOptions, chosen: AnswerOptions, output: OutputOptions) -> int:
    """Find the largest batch of a command on emulated GPUs."""
    from planner.cli.commands.run import emulated_device
    from planner.emulator import RunOptions, compiled_dir
    from planner.planning.command import find_largest_batch

    options = RunOptions(
        emulated_device(card.gpu, card.gpu_mib),
        whole("--gpus", chosen.gpus, "2") or 1,
        alloc_conf=card.alloc_conf,
    )
    confidence = card.keywords()["confidence"] or DEFAULT_CONFIDENCE
    multiple_of = whole("--multiple-of", chosen.multiple_of, "8") or 1
    with working_for_minutes() as tell:
        plan = find_largest_batch(command, options, confidence, multiple_of, compiled_dir(), tell)
    answer(CommandResult(plan), output)
    fits = plan.search.comfortable if chosen.no_retries else plan.search.largest
    return 0 if fits else 1


def _refuse_beside_command(
    job: JobOptions, card: CardOptions, stored: CalibrationOptions, how: MethodOptions
) -> None:
    """Raise UsageError for the first option that means nothing beside a command."""
    told = {
        **job.keywords(),
        "allocator_cap_mib": card.allocator_cap_mib,
        "calibrations": stored.calibrations,
        "no_calibration": stored.no_calibration or None,
        "method": how.method,
    }
    given = [name for name, value in told.items() if value is not None and name not in ("cache", "warn")]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise UsageError(f"{option} means nothing beside a command, which is run as it is; leave it away")
