"""The report of `planner replay`: memory readings in the format of the replayed notebook."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from planner.hardware import MIB, Budget
from planner.planning.process import Define, MemoryReading, Place, Process, ProcessLog, Step, Summary, Train
from planner.program import Phase
from planner.report.budget import device_to_json
from planner.report.document import Bullets, Document, Paragraph, Verbatim
from planner.report.units import SCHEMA, attributes, mib_text, with_mib


def _torch_line(reading: MemoryReading) -> str:
    """Return a memory reading as a line of `print_memory_torch`, a function of the replayed notebook.

    NVML's column is left out.
    """
    allocated, peak = reading.allocated_bytes / MIB, reading.peak_allocated_bytes / MIB
    reserved = (reading.reserved_bytes or 0) / MIB
    return (
        f"{reading.label}: allocated = {allocated:.1f} MiB, reserved = {reserved:.1f}MiB, "
        f"max allocated = {peak:.1f} MiB"
    )


def _tensorflow_line(reading: MemoryReading) -> str:
    """Return a memory reading as a line of `print_memory_tf`, a function of the replayed notebook.

    The last column is left out.
    """
    now, peak = reading.allocated_bytes / MIB, reading.peak_allocated_bytes / MIB
    return f"{reading.label}: current = {now:.1f} MiB, peak = {peak:.1f}MiB"


def process_document(
    process: Process, log: ProcessLog, framework: str, assumptions: Sequence[str]
) -> Document:
    """Return the report of `planner replay`.

    It has readings under headings, the failed request if there is one, and assumptions.
    """
    line = _torch_line if framework == "torch" else _tensorflow_line
    sections = (
        [Verbatim([*([f"## {name}"] if name else []), *map(line, readings)])]
        for name, readings in groupby(log.readings, lambda reading: reading.section)
    )
    ended = [] if log.failure is None else [Paragraph(f"Out of memory {_end(process, log)}", "bad")]
    return Document.of(*sections, ended, [Bullets("Assumed", tuple(assumptions))])


def _end(process: Process, log: ProcessLog) -> str:
    failure = log.failure
    assert failure is not None
    where = f"at steps[{failure.index}], {_describe(process[failure.index])}"
    if failure.phase is Phase.SETUP:
        where += ", placing the model"
    elif failure.phase is not None:
        where += f", step {failure.loop_step}, {failure.phase}"
    return f"{where}: no room for {mib_text(failure.requested_bytes)} MiB"


def _describe(step: Step) -> str:
    """Return a short description of a step that can request memory."""
    match step:
        case Define(name):
            return f"define {name}"
        case Place(model):
            return f"place {model.name}"
        case Summary(model, batch):
            return f"summary of {model.name} at batch {batch}"
        case Train(model, batch):
            return f"train {model.name} at batch {batch}"
        case _:
            return type(step).__name__


def process_to_json(
    process: Process,
    log: ProcessLog,
    framework: str,
    assumptions: Sequence[str],
    unknown_ops: Sequence[str],
    seconds: Mapping[str, float],
    budget: Budget | None,
) -> dict[str, Any]:
    """Return the JSON object of `planner replay`.

    `device` is null without a budget, and `failure` if no request fails.
    """
    return {
        "schema": SCHEMA,
        "framework": framework,
        "device": None if budget is None else device_to_json(budget),
        "readings": [with_mib(reading) for reading in log.readings],
        "retries": log.retries,
        "failure": _failure(process, log),
        "assumptions": list(assumptions),
        "unknown_ops": list(unknown_ops),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }


def _failure(process: Process, log: ProcessLog) -> dict[str, Any] | None:
    failure = log.failure
    if failure is None:
        return None
    return {
        "index": failure.index,
        "step": _describe(process[failure.index]),
        **attributes(failure, "loop_step", "phase", "requested_mib"),
    }
