"""`planner gpus`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from planner.cli.commands.compare import picture_path
from planner.cli.commands.estimate import BatchOptions
from planner.cli.declared import AllocatorCap, AllocConf, Confidence, MultipleOf
from planner.cli.options import (
    CalibrationOptions,
    JobOptions,
    OutputOptions,
    Text,
    takes,
    values_of,
    whole,
)
from planner.cli.output import answer, answering_first, working
from planner.cli.words import Option
from planner.errors import UsageError, unsaved

if TYPE_CHECKING:
    from planner.api import GpusResult


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """Which GPUs, in which order, and where else to."""

    sort: Annotated[
        Text, Option(metavar="KEY", help="Order: max_batch (the default), memory, name, process or headroom.")
    ] = None
    filter: Annotated[
        list[str] | None,
        Option(metavar="WORDS", help="Only GPUs that `planner devices WORDS` lists; repeatable: all apply."),
    ] = None
    min_mib: Annotated[Text, Option(metavar="N", help="Only GPUs with a total of at least N MiB.")] = None
    max_mib: Annotated[Text, Option(metavar="N", help="Only GPUs with a total of at most N MiB.")] = None
    multiple_of: MultipleOf = None
    csv: Annotated[bool, Option("--csv", help="Print comma-separated values instead of the table.")] = False
    plot: Annotated[
        Text,
        Option(metavar="FILE", help="Also draw peak memory against batch size: a .png, .svg or .pdf."),
    ] = None


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What holds for every GPU."""

    allocator_cap_mib: AllocatorCap = None
    alloc_conf: AllocConf = None
    confidence: Confidence = None


@takes(BatchOptions, JobOptions, MemoryOptions, CalibrationOptions, ChoiceOptions, OutputOptions)
def gpus_command(
    size: BatchOptions,
    job: JobOptions,
    memory: MemoryOptions,
    stored: CalibrationOptions,
    choice: ChoiceOptions,
    output: OutputOptions,
) -> int:
    """List every GPU with its largest batch, or those that run a batch."""
    if choice.csv and output.json:
        raise UsageError("--csv and --json: both say how to answer; give one of them")
    batch = whole("--batch", size.batch, "32")
    path = None if choice.plot is None else picture_path(choice.plot)
    bounds = {
        "multiple_of": whole("--multiple-of", choice.multiple_of, "8"),
        "min_mib": whole("--min-mib", choice.min_mib, "24000"),
        "max_mib": whole("--max-mib", choice.max_mib, "48000"),
    }
    from planner.api import gpus

    options = job.keywords() | values_of(memory) | stored.keywords() | bounds

    def write(result: "GpusResult") -> None:
        if choice.csv:
            print(result.to_csv(), flush=True)
        else:
            answer(result, output)

    with answering_first(write), working() as tell:
        result = gpus(batch=batch, sort=choice.sort, filter=choice.filter, **options, tell=tell)
        if path is not None:
            tell("drawing")
            with unsaved(result):
                result.draw(path)
    write(result)
    return 0 if any(fit.max_batch for fit in result.fits) else 1
