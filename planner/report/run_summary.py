"""What pages and pictures say of a command that ran on an emulated GPU."""

import shlex
from collections.abc import Iterator
from pathlib import PurePath

from planner.emulator import EmulatedRun
from planner.planning.command import ExplainedRun
from planner.program import Outcome
from planner.report.commands.run import failure_lines, versions_text
from planner.report.summary import Summary, mib_text

_VERDICTS = {
    Outcome.FITS: "The command fits",
    Outcome.FITS_WITH_RETRIES: "The command fits with retries: cached memory was released to make room",
    Outcome.DOES_NOT_FIT: "The command runs out of memory",
}


def summary_of_run(explained: ExplainedRun) -> Summary:
    """Return the summary of an emulated run."""
    run = explained.run
    gpu = f"{run.gpu} (emulated)"
    name = _script(run)
    stopped = f", stopped after {run.largest.step_count} optimizer steps" if run.largest.was_stopped else ""
    return Summary(
        name=name,
        title=f"{name} on {gpu}",
        caption=f"{name} on {gpu}",
        about=f"Emulated run: {shlex.join(run.command)}; exit code {run.exit_code}{stopped}; "
        f"{versions_text(run.largest)}",
        outcome=run.outcome,
        verdict=_VERDICTS[run.outcome],
        failure=" ".join(" ".join(failure_lines(run.failure)).split()),
        tiles=tuple(_tiles(explained)),
        parts=explained.parts,
        sureness="",
        assumptions=(*run.assumptions, *explained.notes),
        data={"emulated": True, "gpu": run.gpu, "command": list(run.command)},
    )


def _tiles(explained: ExplainedRun) -> Iterator[tuple[str, str]]:
    peak = explained.record.peak
    yield "process, as nvidia-smi shows it", mib_text(peak.process_bytes)
    yield "peak reserved", mib_text(peak.reserved_bytes)
    yield "peak allocated", mib_text(peak.allocated_bytes)
    yield "headroom", mib_text(explained.device.usable.value - peak.process_bytes)
    yield "optimizer steps", f"{explained.record.step_count:,}"


def _script(run: EmulatedRun) -> str:
    """Return the name of the script, or of the command where there is none."""
    scripts = [word for word in run.command if word.endswith(".py")]
    return PurePath(scripts[0] if scripts else run.command[0]).name
