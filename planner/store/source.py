"""Find the programs of a job in memory or in stores, or else build them with torch."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from msgspec.structs import replace

from planner._support.versions import installed_version, public_version
from planner.errors import ModelError
from planner.jobs import Job
from planner.program import (
    ANY_BATCH_SIZE,
    FIT_BATCHES,
    BatchSizes,
    Capability,
    ConvWorkspaceQuery,
    KernelWorkspaces,
    LowerBound,
    Program,
    ProgramBuilder,
    Target,
    Trace,
    has_convolutions,
    live_bytes_bound,
)
from planner.store.store import ProgramStore


@dataclass(slots=True)
class ProgramSource:
    """A source of a job's traces, which reads programs from stores, or captures and stores them."""

    job: Job
    stores: Sequence[ProgramStore]
    open_builder: Callable[[], ProgramBuilder]  # imports torch
    convolutions: ConvWorkspaceQuery | None = None  # reports the workspaces of convolutions
    _programs: list[Program] = field(default_factory=list)
    _builder: ProgramBuilder | None = None
    _was_read: set[tuple[int, Capability]] = field(default_factory=set)  # IDs of stores, and capabilities
    _built: set[Capability] = field(default_factory=set)
    _failures: dict[tuple[int, Target], ModelError] = field(default_factory=dict)
    _bounds: dict[int, LowerBound] = field(default_factory=dict)  # by the program's structure
    _last: tuple[tuple[int, Target], tuple[Program, KernelWorkspaces]] | None = None  # the last result

    def trace(self, batch: int, target: Target) -> Trace:
        """Return the trace at a batch size, captured if no program covers it.

        Raises the errors of a capture.
        """
        program, workspaces = self.specialized(batch, target)
        trace = program.instantiate(batch, workspaces)
        trace = replace(trace, notes=(*trace.notes, note_on_torch(program.torch)))
        if self.convolutions is None or not has_convolutions(program):
            return trace
        return name_source(trace, self.convolutions, target)

    def traced_notes(self, batch: int, target: Target) -> tuple[str, ...]:
        """Return the notes of the trace at a batch size, except notes on convolution workspaces."""
        program, _ = self.specialized(batch, target)
        return (*program.notes, note_on_torch(program.torch))

    def key(self, batch: int, target: Target) -> Hashable:
        """Return a key of the trace at `batch`: targets with equal keys have traces with equal events."""
        program, workspaces = self.specialized(batch, target)
        return program.structure, workspaces

    def bound(self, target: Target) -> LowerBound | None:
        """Return a lower bound of tensors' bytes as a function of batch size, or None without a program."""
        program = self.program(target)
        if program is None:
            return None
        if program.structure not in self._bounds:
            self._bounds[program.structure] = live_bytes_bound(program.events, program.unit)
        return self._bounds[program.structure]

    def batch_sizes(self, target: Target) -> BatchSizes:
        """Return the batch sizes that a search may try, by the job's program, or all if it has no program."""
        program = self.program(target)
        return ANY_BATCH_SIZE if program is None else program.batch_sizes(target, FIT_BATCHES[0])

    def program(self, target: Target) -> Program | None:
        """Return the target's program for many batch sizes, read or built, or None if the job has none."""
        self._build(target)
        return self._known(target)

    def run(self, batch: int, target: Target) -> Program:
        """Return the program that covers a batch size, captured if none is known.

        Raises the errors of a capture.
        """
        return self.specialized(batch, target)[0]

    def enumerate_variants(self, program: Program, target: Target) -> None:
        """Evaluate a program's workspace rules at sample batch sizes, so that the program can be saved.

        Does nothing if no builder was opened.
        """
        if self._builder is not None:
            self._builder.enumerate_variants(program, target)

    def specialized(self, batch: int, target: Target) -> tuple[Program, KernelWorkspaces]:
        """Return the program and the kernels' workspaces for a batch size, captured if no program covers it.

        Raises the errors of a capture.
        """
        target = replace(target, conv_workspace_query=self.convolutions)
        if self._last is not None and self._last[0] == (batch, target):  # a trace after its key
            return self._last[1]
        failure = self._failures.get((batch, target))
        if failure is not None:
            raise failure
        try:
            for programs in self._candidates(batch, target):
                for program in programs:
                    workspaces = program.workspaces_at(batch, target)
                    if workspaces is not None:
                        self._last = (batch, target), (program, workspaces)
                        return program, workspaces
        except ModelError as error:
            self._failures[batch, target] = error
            raise
        raise AssertionError(f"a run at batch {batch} that does not hold there")

    def _candidates(self, batch: int, target: Target) -> Iterator[Sequence[Program]]:
        """Yield lists of programs that may cover a batch size, cheapest first."""
        yield self._programs
        for store in self.stores:
            if self._read(store, target):
                yield self._programs
            self._add(store.get(self.job, target, batch))
            yield self._programs
        if batch in FIT_BATCHES:  # the program will be needed, and is built from runs at these sizes
            self._build(target)
            yield self._programs
        program = self._open().run(batch, target)
        if self.stores and not program.is_constant(target):  # its range has become wider
            self.enumerate_variants(program, target)
        yield [self._store(program, target)]

    def _build(self, target: Target) -> None:
        """Read or build the programs for the target's compute capability.

        This is done at most once per capability. If a store has a run that the program would cover, the job
        has no program: the program would have been stored instead of the run.
        """
        if target.capability in self._built:
            return
        self._built.add(target.capability)
        for store in self.stores:
            self._read(store, target)
            if self._known(target) is not None:
                return
        if any(store.get(self.job, target, FIT_BATCHES[0]) for store in self.stores):
            return
        builder = self._open()
        for program in builder.programs(target):
            if self.stores:
                builder.enumerate_variants(program, target)
            self._store(program, target)

    def _known(self, target: Target) -> Program | None:
        return next((one for one in self._programs if not one.is_constant(target)), None)

    def _read(self, store: ProgramStore, target: Target) -> bool:
        """Read a store's programs for the target's compute capability; return False if it was done before."""
        place = id(store), target.capability
        if place in self._was_read:
            return False
        self._was_read.add(place)
        self._add(store.get(self.job, target))
        return True

    def _add(self, programs: Sequence[Program]) -> None:
        existing = {id(program) for program in self._programs}
        self._programs += [program for program in programs if id(program) not in existing]

    def _open(self) -> ProgramBuilder:
        if self._builder is None:
            self._builder = self.open_builder()
        return self._builder

    def _store(self, program: Program, target: Target) -> Program:
        program.torch = installed_version("torch") or "?"
        self._add([program])
        for store in self.stores:
            store.put(self.job, target, program)
        return program


@cache
def note_on_torch(torch: str) -> str:
    """Return a note on the PyTorch version that captured the traces."""
    installed = installed_version("torch")
    if installed is None:
        how = f"beforehand with PyTorch {torch}, which is not installed here"
    else:
        how = f"with PyTorch {installed if public_version(installed) == public_version(torch) else torch}"
    return f"traced {how}; other versions keep other tensors"


def name_source(trace: Trace, convolutions: ConvWorkspaceQuery, target: Target) -> Trace:
    """Return a copy of a trace that names `convolutions` as the source of its convolution workspaces.

    The copy has the source's account and notes, and functions that return a convolution's workspaces and the
    sizes requested after a refusal.
    """
    gpu = target.capability, target.sm_count
    account = convolutions.account(*gpu)
    return replace(
        trace,
        notes=(*trace.notes, *account.notes),
        conv_account=account,
        next_workspaces=partial(convolutions.following, *gpu),
        workspaces_of=partial(convolutions, *gpu),
    )
