"""A job and its programs from a saved file, which give traces of other batch sizes and GPUs too.

If the file does not cover a kernel at a batch size, the kernel is given its workspace at the nearest covered
batch size, with a note.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from planner.errors import DataFileError, UsageError
from planner.jobs import Job, job_from_json
from planner.program import (
    FIT_BATCHES,
    LARGEST_BATCH,
    BatchSizes,
    ConvWorkspaceQuery,
    KernelWorkspaces,
    LowerBound,
    Program,
    Target,
    Trace,
    answer_convolutions,
    first_matching,
    live_bytes_bound,
    sample_batches,
)
from planner.store.codec import ProgramFile, load_programs
from planner.store.layout import LARGEST_NUMBER
from planner.store.source import name_source
from planner.store.store import BROKEN

_NEAREST = 16  # number of smaller sample batch sizes to try: two doublings, or all sizes


@dataclass(slots=True)
class SavedJob:
    """A `ProgramSet` of a job that was read from a saved file."""

    path: Path
    file: ProgramFile
    job: Job
    batch: int
    target: Target  # the GPU that the file was saved for
    convolutions: ConvWorkspaceQuery | None = None  # reports workspaces that the file leaves open
    _bounds: dict[int, LowerBound] = field(default_factory=dict)  # by the program's structure

    @property
    def covers_batches(self) -> bool:
        """Return whether the file covers more than one batch size."""
        return not all(program.is_constant(self.target) for program in self._programs(self.target))

    @property
    def has_queries(self) -> bool:
        """Return whether a library must report some of the file's convolution workspaces."""
        return any(one.kernels.convolutions for one in self.file.programs)

    def trace(self, batch: int, target: Target) -> Trace:
        """Return the trace at a batch size on a GPU, with a note for each approximation.

        Raises UsageError if the file covers no near batch size, and DataFileError if its programs are broken.
        """
        program, workspaces, notes = self._find(batch, target)
        trace = program.instantiate(batch, workspaces)
        if self.convolutions is not None and workspaces.has_convolutions:
            trace = name_source(trace, self.convolutions, target)
        return replace(trace, notes=(*trace.notes, *notes))

    def key(self, batch: int, target: Target) -> Hashable:
        """Return a key of the trace at `batch`: targets with equal keys have traces with equal events."""
        program, workspaces, notes = self._find(batch, target)
        return program.structure, workspaces, notes

    def bound(self, target: Target) -> LowerBound:
        """Return a function from a batch size to a lower bound, in bytes, of the memory of the tensors."""
        program = self._programs(target)[0]
        if program.structure not in self._bounds:
            self._bounds[program.structure] = live_bytes_bound(program.events, program.unit)
        return self._bounds[program.structure]

    def batch_sizes(self, target: Target) -> BatchSizes:
        """Return the batch sizes that a search may try, by the file's first program.

        They are the batch sizes for the file's GPU if the program has no variants for the target.
        """
        program = self._programs(target)[0]
        known = target if target.capability in program.targets else self.target
        return program.batch_sizes(known, FIT_BATCHES[0])

    def _find(self, batch: int, target: Target) -> tuple[Program, KernelWorkspaces, tuple[str, ...]]:
        """Return the program and the kernels' workspaces for a batch size, and notes on approximations."""
        target = replace(target, conv_workspace_query=self.convolutions)
        programs = self._programs(target)
        other = target if target.capability in programs[0].targets else self.target
        nearest = replace(target, capability=other.capability)
        notes = () if nearest == target else (_other_capability(nearest),)
        for program in programs:
            workspaces = program.workspaces_at(batch, nearest)
            if workspaces is not None:
                return program, self._checked(workspaces), notes
        workspaces, more = self._nearest(programs[0], batch, nearest)
        return programs[0], self._checked(workspaces), (*notes, *more)

    def _nearest(
        self, program: Program, batch: int, target: Target
    ) -> tuple[KernelWorkspaces, tuple[str, ...]]:
        """Return each kernel's workspaces at the nearest batch size that the file covers for it, and notes.

        The nearest size is searched downwards from `batch`. The notes name the sizes that were used. Raises
        UsageError if the program holds for one batch size only, if `batch` is not a multiple of its unit, or
        if no near batch size covers a kernel.
        """
        known = program.targets[target.capability]
        if known.min_batch == known.max_batch:
            only = f"this trace holds for batch {known.min_batch} only"
            raise UsageError(f"{self.path}: {only}; capture batch {batch} again")
        unit = program.unit
        if batch % unit:
            raise UsageError(f"{self.path}: it holds multiples of {unit} alone; capture batch {batch} again")
        least, most = known.min_batch // unit, known.max_batch // unit
        inside = min(max(batch // unit, least), most)
        below = [size for size in sample_batches(least, most) if size < inside]
        sizes = [inside, *reversed(below[-_NEAREST:]), least]
        places = [(size, count) for size in sizes for count in (target.sm_count, self.target.sm_count)]
        others: set[tuple[int, int]] = set()
        by_signature = []
        for variants in known.by_signature:
            tries = ((place, first_matching(variants, *place)) for place in places)
            match = next(((place, ops) for place, ops in tries if ops is not None), None)
            if match is None:
                raise UsageError(f"{self.path}: the file does not cover batch {batch}; capture it again")
            others.add(match[0])
            by_signature.append(match[1])
        others = {(size * unit, count) for size, count in others} - {(batch, target.sm_count)}
        notes = _other_sizes(others, batch, target)
        if batch > known.max_batch:
            notes = (
                *notes,
                f"the file's program was validated against runs up to batch {known.max_batch} only",
            )
        return answer_convolutions(known.cublas_bytes, by_signature, target), notes

    def _checked(self, workspaces: KernelWorkspaces) -> KernelWorkspaces:
        if any(size > LARGEST_NUMBER for ops in workspaces.by_signature for _, size in ops):
            raise self._broken("a workspace exceeds 2**63 bytes")
        return workspaces

    def _programs(self, target: Target) -> list[Program]:
        """Return the programs for the target or, if there are none, for the file's GPU.

        Raises DataFileError if the file has no programs for either GPU, or if they are broken.
        """
        try:
            for capability in (target.capability, self.target.capability):
                programs = [one.program for one in self.file.programs if one.load_target(capability)]
                if programs:
                    return programs
        except BROKEN as error:
            raise self._broken(f"{type(error).__name__}: {str(error)[:200]}") from error
        raise self._broken("none is of the GPU that was planned for")

    def _broken(self, why: str) -> DataFileError:
        return DataFileError(f"{self.path}: broken programs of a trace: {why}; capture it again")


def open_saved(path: Path) -> SavedJob:
    """Read a saved job with its programs from a file. Raises DataFileError."""
    file = load_programs(path)
    about = file.about
    try:
        job, batch = job_from_json(about["job"]), about["batch"]
        major, minor = about["capability"]
        sm_count = about.get("multiprocessors")
        numbers = (batch, major, minor) if sm_count is None else (batch, major, minor, sm_count)
        if not all(type(number) is int and abs(number) <= LARGEST_NUMBER for number in numbers):
            raise TypeError("batch, capability and multiprocessors are integers")
        if not 1 <= batch <= LARGEST_BATCH:
            raise ValueError(f"batch {batch}")
    except BROKEN as error:
        raise DataFileError(
            f"{path}: broken job of a trace: {type(error).__name__}: {error}; capture it again"
        ) from error
    saved = SavedJob(path, file, job, batch, Target.for_capability((major, minor), sm_count))
    saved.bound(saved.target)
    return saved


def _other_capability(target: Target) -> str:
    major, minor = target.capability
    return f"traced for compute capability {major}.{minor}; this GPU's kernels may take other memory"


def _other_sizes(others: set[tuple[int, int]], batch: int, target: Target) -> tuple[str, ...]:
    if not others:
        return ()
    at = ", ".join(f"batch {size} on {count} multiprocessors" for size, count in sorted(others))
    here = f"batch {batch} on {target.sm_count} multiprocessors"
    return (f"the file does not know what all kernels take at {here}; some are given what they take at {at}",)
