"""What a process printed, in the form in which its notebook prints it, and as plain data for `json.dumps`."""

from collections.abc import Callable, Iterable, Iterator
from textwrap import wrap
from typing import Any

from planner.hardware import MIB
from planner.planning.process import Account, Define, Place, Process, Reading, Step, Summary, Train
from planner.program import Phase
from planner.report.units import mib

SCHEMA = 1
WIDTH = 100

LineForm = Callable[[Reading], str]


def torch_line(reading: Reading) -> str:
    """As the notebook's `print_memory_torch` writes it, without the last column.

    That one is NVML's for the whole GPU, in which other processes and other libraries count.
    """
    allocated, peak = reading.allocated_bytes / MIB, reading.peak_allocated_bytes / MIB
    reserved = (reading.reserved_bytes or 0) / MIB
    return (
        f"{reading.label}: allocated = {allocated:.1f} MiB, reserved = {reserved:.1f}MiB, "
        f"max allocated = {peak:.1f} MiB"
    )


def tensorflow_line(reading: Reading) -> str:
    """As the notebook's `print_memory_tf` writes it, without the last column."""
    now, peak = reading.allocated_bytes / MIB, reading.peak_allocated_bytes / MIB
    return f"{reading.label}: current = {now:.1f} MiB, peak = {peak:.1f}MiB"


def account_text(process: Process, account: Account, form: LineForm, assumed: Iterable[str]) -> str:
    """The lines of a process under their headings, how it ended, and what is taken for granted."""
    lines = list(_under_headings(account.readings, form))
    if account.failure is not None:
        lines += ["", f"Out of memory {_ending(process, account)}"]
    lines += ["", "Assumed"]
    for sentence in assumed:
        lines += wrap(
            sentence, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def account_to_json(process: Process, account: Account, assumed: Iterable[str]) -> dict[str, Any]:
    """The readings and the end of a process; MiB are rounded to 0.001, null stands for what is not told."""
    return {
        "readings": [_reading(reading) for reading in account.readings],
        "retries": account.retries,
        "failure": _failure(process, account),
        "assumptions": list(assumed),
    }


def _under_headings(readings: Iterable[Reading], form: LineForm) -> Iterator[str]:
    section, first = "", True
    for reading in readings:
        if reading.section != section:
            section = reading.section
            yield from (f"## {section}",) if first else ("", f"## {section}")
        yield form(reading)
        first = False


def _ending(process: Process, account: Account) -> str:
    failure = account.failure
    assert failure is not None
    where = f"at steps[{failure.index}], {describe(process[failure.index])}"
    if failure.phase is Phase.SETUP:
        where += ", placing the model"
    elif failure.phase is not None:
        where += f", step {failure.loop_step}, {failure.phase}"
    return f"{where}: no room for {mib(failure.requested_bytes, 1):,} MiB"


def describe(step: Step) -> str:
    """A step that can ask for memory, in a few words."""
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


def _reading(reading: Reading) -> dict[str, Any]:
    reserved = reading.reserved_bytes
    return {
        "section": reading.section,
        "label": reading.label,
        "allocated_mib": mib(reading.allocated_bytes),
        "reserved_mib": None if reserved is None else mib(reserved),
        "peak_allocated_mib": mib(reading.peak_allocated_bytes),
    }


def _failure(process: Process, account: Account) -> dict[str, Any] | None:
    failure = account.failure
    if failure is None:
        return None
    return {
        "index": failure.index,
        "step": describe(process[failure.index]),
        "loop_step": failure.loop_step,
        "phase": None if failure.phase is None else failure.phase.value,
        "requested_mib": mib(failure.requested_bytes),
    }
