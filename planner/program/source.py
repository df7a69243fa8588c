"""Protocols for sources of traces and programs. Planning uses them for stores and for captures."""

from collections.abc import Callable, Hashable
from typing import Protocol

from planner.program.batch_sizes import BatchSizes
from planner.program.bounds import LowerBound
from planner.program.events import Trace
from planner.program.program import Program
from planner.program.target import Target

# Programs are fitted to runs at these batch sizes. At batch 1 broadcasting and contiguity take shortcuts.
FIT_BATCHES = (2, 3)

OnProgress = Callable[[str], None]  # called with one short line for each step that takes time
TraceSource = Callable[[int], Trace]  # returns the job's trace at a batch size


class ProgramSet(Protocol):
    """A source of the traces of one job at any batch size on any GPU."""

    def trace(self, batch: int, target: Target) -> Trace:
        """Return the trace at a batch size. Raises UsageError or ModelError."""

    def key(self, batch: int, target: Target) -> Hashable:
        """Return a key of the trace at a batch size, or None if traces must be compared.

        At one batch size, two targets have equal keys if and only if their traces are equal.
        """

    def bound(self, target: Target) -> LowerBound | None:
        """Return a function from a batch size to the fewest bytes that tensors take, or None if unknown."""

    def batch_sizes(self, target: Target) -> BatchSizes:
        """Return the batch sizes that a search may try. Raises the errors of a capture."""


class ProgramBuilder(Protocol):
    """A builder that captures programs of a job with torch."""

    def programs(self, target: Target) -> tuple[Program, ...]:
        """Return the programs for the target, or () if no program fits.

        The first program holds for a range of batch sizes. A second program, if made, is for batch size 1.
        """

    def run(self, batch: int, target: Target) -> Program:
        """Capture a run at a batch size, and return a program that holds there.

        The program holds for this batch size only, unless the run extends the range of the job's program; the
        job's program is then returned. Raises the errors of a capture.
        """

    def enumerate_variants(self, program: Program, target: Target) -> None:
        """Add variants to a program by evaluating its workspace rules at sample batch sizes.

        The program can then be used without torch.
        """


def ignore_progress(line: str) -> None:
    """Discard a line of progress."""
