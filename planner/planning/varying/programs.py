"""The traces of a job at any size of its samples."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from msgspec import Struct

from planner.emulator import open_convolutions
from planner.jobs import BatchShape, Job, Size, SizeDistribution, at_size
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

Factory = Callable[[], object]  # returns an nn.Module


@dataclass(slots=True)
class SizedPrograms:
    """The traces of a job at all sizes that its batches are padded to, on one kind of GPU."""

    job: Job
    sizes: SizeDistribution
    target: Target
    on_progress: OnProgress
    factory: Factory | None = None
    cache_folder: Path | None = None
    seconds: float = 0.0  # that traces took
    _convolutions: ConvWorkspaceQuery | None = None
    _families: dict[int, "SizeFamily"] = field(default_factory=dict)  # by the only batch size; 0: any
    _sources: dict[Size, ProgramSource] = field(default_factory=dict)

    def with_job(self, job: Job, sizes: SizeDistribution) -> "SizedPrograms | None":
        """Return these programs for other batches of the same samples; None where traces differ."""
        size = self.sizes.largest
        is_same = len(sizes.ranges) == len(size) and at_size(job, size) == self.job_at(size)
        if not is_same or (len(size) == 1 and not set(sizes.paddings()) <= set(self.sizes.paddings())):
            return None
        return replace(self, job=job, sizes=sizes)  # with the same captures

    def job_at(self, size: Size) -> Job:
        """Return the job whose samples all have this size."""
        return at_size(self.job, size)

    def trace(self, shape: BatchShape) -> Trace:
        """Return the trace of batches of this shape. Raises the errors of a capture."""
        return self._source(shape).trace(shape.batch, self.target)

    def specialized(self, shape: BatchShape) -> tuple[Program, KernelWorkspaces]:
        """Return the program of batches of this shape, and what its kernels allocate. Raises likewise."""
        return self._source(shape).specialized(shape.batch, self.target)

    def _source(self, shape: BatchShape) -> ProgramSource:
        """Return the programs at a size, that for several samples built where the shape needs it."""
        start = perf_counter()
        source = self.source(shape.size)
        if shape.batch > 1:
            source.program(self.target)
        self.seconds += perf_counter() - start
        return source

    def source(self, size: Size) -> ProgramSource:
        """Return the programs at a size."""
        if size not in self._sources:
            if not self._sources:
                self._convolutions = open_convolutions(self.job, self.cache_folder)
            builder = _Member(self._family, size)
            self._sources[size] = ProgramSource(self.job_at(size), (), lambda: builder, self._convolutions)
        return self._sources[size]

    def _family(self, only_batch: int) -> "SizeFamily":
        """Return the programs at all sizes, which share what their runs show."""
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
    """Builder of the programs at one size, from those at all sizes."""

    family: "Callable[[int], SizeFamily]"
    size: Size

    def programs(self, target: Target) -> tuple[Program, ...]:
        """Return the program for batches of two samples and more; none where no program fits."""
        program = self.family(0).program(self.size)
        return () if program is None else (program,)

    def run(self, batch: int, target: Target) -> Program:
        """Return the program of a batch of one sample, or of a run at another batch size."""
        family = self.family(1 if batch == 1 else 0)
        program = family.program(self.size) if batch == 1 else None
        return family.builder(self.size).run(batch, target) if program is None else program

    def enumerate_variants(self, program: Program, target: Target) -> None:
        """Do nothing: nothing is stored."""
