"""Open the programs and traces of a job at any size of its samples."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from msgspec import Struct

from planner.emulator import open_convolutions
from planner.jobs import BatchShape, Job, Size, SizeDistribution, at_size
from planner.planning.programs import Factory
from planner.program import (
    ConvWorkspaceQuery,
    KernelWorkspaces,
    OnProgress,
    Program,
    Target,
    Trace,
)
from planner.store import ProgramSource

if TYPE_CHECKING:
    from planner.capture import SizeFamily


@dataclass(slots=True)
class SizedPrograms:
    """The programs and traces of a job at all padded sizes, on one kind of GPU."""

    job: Job
    sizes: SizeDistribution
    target: Target
    on_progress: OnProgress
    factory: Factory | None = None
    cache_folder: Path | None = None
    seconds: float = 0.0  # spent on traces
    _convolutions: ConvWorkspaceQuery | None = None
    _families: dict[int, "SizeFamily"] = field(default_factory=dict)  # by `only_batch`, see `_family`
    _sources: dict[Size, ProgramSource] = field(default_factory=dict)

    def with_job(self, job: Job, sizes: SizeDistribution) -> "SizedPrograms | None":
        """Return programs of another job that reuse these captures, or None if the job's traces differ.

        The job must have the same traces at each size, and may batch its samples differently.
        """
        size = self.sizes.largest
        is_same = len(sizes.ranges) == len(size) and at_size(job, size) == self.job_at(size)
        if not is_same or (len(size) == 1 and not set(sizes.paddings()) <= set(self.sizes.paddings())):
            return None
        return replace(self, job=job, sizes=sizes)  # with the same captures

    def job_at(self, size: Size) -> Job:
        """Return the job with all samples set to the size `size`."""
        return at_size(self.job, size)

    def trace(self, shape: BatchShape) -> Trace:
        """Return the trace of batches of this shape. Raises the errors of a capture."""
        return self._source(shape).trace(shape.batch, self.target)

    def specialized(self, shape: BatchShape) -> tuple[Program, KernelWorkspaces]:
        """Return the program for batches of a shape, and its kernels' workspaces.

        Raises the errors of a capture.
        """
        return self._source(shape).specialized(shape.batch, self.target)

    def _source(self, shape: BatchShape) -> ProgramSource:
        """Return the programs at the size of a shape.

        The program is built already if the shape has several samples.
        """
        start = perf_counter()
        source = self.source(shape.size)
        if shape.batch > 1:
            source.program(self.target)
        self.seconds += perf_counter() - start
        return source

    def source(self, size: Size) -> ProgramSource:
        """Return the programs at a size, and open them on first use."""
        if size not in self._sources:
            if not self._sources:
                self._convolutions = open_convolutions(self.job, self.cache_folder)
            builder = _Member(self._family, size)
            self._sources[size] = ProgramSource(self.job_at(size), (), lambda: builder, self._convolutions)
        return self._sources[size]

    def _family(self, only_batch: int) -> "SizeFamily":
        """Return the cached programs at all sizes, for the batch size `only_batch` or for any if it is 0."""
        if only_batch not in self._families:
            self.on_progress("importing torch and the model's library")
            from planner.capture import open_size_family

            family = open_size_family(
                self.job_at,
                self.sizes.grid(),
                self.target,
                self.on_progress,
                self.factory,
                only_batch,
            )
            self._families[only_batch] = family
        return self._families[only_batch]


class _Member(Struct, frozen=True):
    """A builder of the programs at the size `size`, which it takes from a family of programs at all sizes."""

    family: "Callable[[int], SizeFamily]"
    size: Size

    def programs(self, target: Target) -> tuple[Program, ...]:
        """Return the program for batches of two or more samples in a tuple, or () if no program fits."""
        program = self.family(0).program(self.size)
        return () if program is None else (program,)

    def run(self, batch: int, target: Target) -> Program:
        """Return the program of one batch size, from the programs at all sizes or captured by a run.

        Only batches of one sample are taken from the programs at all sizes.
        """
        family = self.family(1 if batch == 1 else 0)
        program = family.program(self.size) if batch == 1 else None
        return family.builder(self.size).run(batch, target) if program is None else program

    def enumerate_variants(self, program: Program, target: Target) -> None:
        """Do nothing: the programs of a size family are not stored."""
