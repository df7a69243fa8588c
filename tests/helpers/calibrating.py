"""Calibrations on the command line, with a GPU whose runs a trace answers."""

from planner.hardware.device import MIB
from planner.jobs import Job
from planner.program import TraceSource
from planner.program.events import Alloc, Category, Phase, PhaseStart, Site, Trace


def tracer(job: Job, capability: tuple[int, int], on_progress: object) -> TraceSource:
    def trace(batch: int) -> Trace:
        events = (PhaseStart(1, Phase.FORWARD), Alloc(0, (100 + 10 * batch) * MIB, Category.ACTIVATION, 0))
        return Trace(events, (Site("", "to"),), batch)

    return trace


JOB_OPTIONS = "--input 4 --loss sum"
