"""A job's events for any batch size and GPU.

They are affine tensor events, kernel calls, and guarded workspaces. `planner.capture.symbolic` fits a program
to two recorded runs. The sizes of the model's tensors are affine in the batch size or, if pairs of samples
are compared, polynomials of degree two, fitted to a third run. If a job splits its batches into n parts,
batch sizes are counted in units of n samples. The workspaces of kernels follow from the workspace rules,
whose results are stored as `GuardedOps`, one list of variants for each distinct call. Specializing a program
yields exactly the trace that a capture would record, or None if no variant's guards hold.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from planner.program.batch_sizes import ANY_BATCH_SIZE, BatchSizes
from planner.program.events import (
    Alloc,
    Category,
    Event,
    Fact,
    Free,
    GrowthSource,
    PhaseStart,
    Site,
    TensorProvenance,
    Trace,
    validate,
)
from planner.program.expr import GuardedOps, first_matching
from planner.program.kernels.convolution import Convolution, ConvWorkspace
from planner.program.kernels.expansion import KernelOps, OpenKernelOps, OpKind, expand_kernel
from planner.program.target import Capability, Target

LARGEST_BATCH = 2**24  # a job that fits even this does not depend on its batch size


class AffineAlloc(Struct, frozen=True, gc=False):
    """The allocation of a block whose bytes are a polynomial in the batch size.

    Its degree is two at most. Its coefficients are `fixed_bytes`, `bytes_per_sample` and `bytes_per_pair`. In
    a program whose `unit` is above 1, the batch size is the number of units, not of samples.
    """

    block: int
    fixed_bytes: int
    bytes_per_sample: int
    category: Category
    site: int
    may_fail: bool = False
    stream: int = 0
    bytes_per_pair: int = 0  # coefficient of the square of the batch size

    def size_at(self, batch: int) -> int:
        """Return the bytes of the block at a batch size. The batch size is in the program's units."""
        return self.fixed_bytes + (self.bytes_per_sample + self.bytes_per_pair * batch) * batch


ProgramEvent = AffineAlloc | Free | PhaseStart


class KernelCall(Struct, frozen=True, gc=False):
    """A call of an operator with a workspace rule, or the first call that uses cuBLAS."""

    signature: int
    site: int
    position: int  # index of the tensor event before which the call runs
    outputs: tuple[bool, ...]  # for each output, whether the next tensor event is its allocation
    first_blas_call: bool  # whether cuBLAS allocates its workspace in this call
    stream: int = 0


class KernelWorkspaces(Struct, frozen=True):
    """The allocator operations of all kernels at one batch size on one GPU."""

    cublas_bytes: int
    by_signature: tuple[KernelOps, ...]
    # By signature: the operations that allocate workspaces of convolutions, in order.
    convolutions: tuple[tuple[tuple[OpKind, Convolution], ...], ...] = ()
    has_convolutions: bool = False  # whether a library reported workspaces of convolutions


_CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
NO_WORKSPACES = KernelWorkspaces(0, ())  # for a program without kernel calls


@dataclass(slots=True)
class Variants:
    """The workspace expressions of a program's kernels for one compute capability."""

    cublas_bytes: int
    min_batch: int
    max_batch: int
    by_signature: list[list[GuardedOps]]


class WorkspaceRules(Protocol):
    """An evaluator of workspace rules; implementations need torch."""

    def evaluate(self, signature: int, batch: int, target: Target) -> GuardedOps:
        """Evaluate a signature's rule at a batch size on a GPU, and return a variant that holds there."""


@dataclass(slots=True)
class Program:
    """The events and kernel calls of a job's first steps, for a range of batch sizes.

    `targets` has the range and the variants of workspaces for each compute capability.
    """

    events: tuple[ProgramEvent, ...]  # without the events of kernels' workspaces
    sites: tuple[Site, ...]
    calls: tuple[KernelCall, ...] = ()
    targets: dict[Capability, Variants] = field(default_factory=dict)
    unknown_ops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    facts: frozenset[Fact] = frozenset()
    provenance: tuple[TensorProvenance, ...] = ()  # only in programs for one batch size
    conv_workspaces: tuple[ConvWorkspace, ...] = ()  # only in programs for one batch size
    growth_sources: tuple[GrowthSource, ...] = ()
    torch: str = ""  # the version that captured the program; "" if the notes name the version
    pinned: tuple[tuple[int, int], ...] = ()  # fixed bytes and bytes per unit of each pinned host block
    unit: int = 1  # batch sizes are multiples of `unit`; expressions and sizes count units
    rules: WorkspaceRules | None = field(default=None, compare=False, repr=False)
    _structure: int | None = field(default=None, compare=False, repr=False)

    @property
    def is_affine(self) -> bool:
        """Return whether the unit is one sample and all sizes are affine in the batch size."""
        return self.unit == 1 and not any(
            isinstance(event, AffineAlloc) and event.bytes_per_pair for event in self.events
        )

    def batch_sizes(self, target: Target, least: int) -> BatchSizes:
        """Return the batch sizes that a search may try: multiples of the unit, or all batch sizes.

        The multiples start at the smallest valid batch size. All batch sizes are allowed if the program is
        constant, or if its range begins at `least` or below; other batch sizes are then captured separately.
        """
        known = self.targets[target.capability]
        if self.is_constant(target) or known.min_batch <= least:
            return ANY_BATCH_SIZE
        return BatchSizes(known.min_batch, self.unit)

    def covers(self, batch: int, target: Target) -> bool:
        """Return whether the program gives the exact trace at a batch size on a GPU."""
        return self.workspaces_at(batch, target) is not None

    def specialize(self, batch: int, target: Target) -> Trace | None:
        """Return the trace at a batch size on a GPU, or None if the program does not hold there."""
        workspaces = self.workspaces_at(batch, target)
        return None if workspaces is None else self.instantiate(batch, workspaces)

    def key(self, batch: int, target: Target) -> Hashable:
        """Return a key of the trace at a batch size on a GPU, or None if `batch` is not covered.

        At one batch size, keys are equal only for equal traces.
        """
        workspaces = self.workspaces_at(batch, target)
        return None if workspaces is None else (self.structure, workspaces)

    @property
    def structure(self) -> int:
        """Return a hash of the tensor events, the kernel calls and `unit`."""
        if self._structure is None:
            self._structure = hash((self.events, self.calls, self.unit))
        return self._structure

    def is_constant(self, target: Target) -> bool:
        """Return whether the program holds for at most one batch size on the target."""
        variants = self.targets.get(target.capability)
        return variants is None or variants.min_batch == variants.max_batch

    def workspaces_at(self, batch: int, target: Target) -> KernelWorkspaces | None:
        """Return all kernels' workspaces at a batch size on a GPU, or None if not covered.

        If no variant's guards hold, the workspace rules are evaluated, if present, and the new variant is
        appended.
        """
        known = self.targets.get(target.capability)
        if known is None or not known.min_batch <= batch <= known.max_batch or batch % self.unit:
            return None
        units = batch // self.unit
        workspaces = []
        for signature, variants in enumerate(known.by_signature):
            ops = first_matching(variants, units, target.sm_count)
            if ops is None and self.rules is not None:
                variants.append(self.rules.evaluate(signature, units, target))
                ops = first_matching(variants[-1:], units, target.sm_count)
            if ops is None:
                return None
            workspaces.append(ops)
        return answer_convolutions(known.cublas_bytes, workspaces, target)

    def instantiate(self, batch: int, workspaces: KernelWorkspaces = NO_WORKSPACES) -> Trace:
        """Return the trace at a batch size, with the given kernel workspaces."""
        convolutions: dict[int, Convolution] = {}
        units = batch // self.unit
        events = tuple(self._splice(units, workspaces, convolutions))
        rows = self.provenance, self.conv_workspaces, self.growth_sources
        pinned = tuple(fixed + per_sample * units for fixed, per_sample in self.pinned)
        trace = Trace(events, self.sites, batch, self.unknown_ops, self.notes, *rows, pinned=pinned)
        return replace(trace, convolutions=convolutions, facts=self.facts)

    def _splice(
        self, batch: int, workspaces: KernelWorkspaces, convolutions: dict[int, Convolution]
    ) -> list[Event]:
        """Return the events of tensors and kernels at a batch size, in order.

        The batch size is in the program's units. Adds the convolution of each workspace to `convolutions`, by
        block.
        """
        own = events_at(self.events, batch)
        number = 1 + max((event.block for event in own if type(event) is Alloc), default=-1)
        first, later = _calls_by_order(workspaces.by_signature)
        called: set[int] = set()
        events: list[Event] = []
        done = 0
        for call in self.calls:
            ops = (later if call.signature in called else first)[call.signature]
            called.add(call.signature)
            cublas_bytes = workspaces.cublas_bytes if call.first_blas_call else 0
            if not ops and not cublas_bytes:
                continue
            events += own[done : call.position]
            done = call.position + sum(call.outputs)
            allocs = iter(own[call.position : done])
            outputs = [[next(allocs)] if takes else [] for takes in call.outputs]
            made = expand_kernel(ops, outputs, cublas_bytes, call.site, number, call.stream)
            if workspaces.convolutions and workspaces.convolutions[call.signature]:
                kinds = {kind for kind, _ in ops}
                blocks = (event.block for event in made if type(event) is Alloc and event.may_fail)
                called_now = (one for kind, one in workspaces.convolutions[call.signature] if kind in kinds)
                convolutions.update(zip(blocks, called_now, strict=True))
            number += len(made)
            events += made
        return events + own[done:]


def has_convolutions(traced: Program | Trace) -> bool:
    """Return whether a program or trace has a convolution, forward or backward."""
    return any(site.op in _CONVOLUTIONS for site in traced.sites)


def answer_convolutions(
    cublas_bytes: int, by_signature: Iterable[OpenKernelOps], target: Target
) -> KernelWorkspaces:
    """Return the operations of all kernels, with each convolution replaced by its workspaces on `target`."""
    has_convolutions = False
    answered: list[KernelOps] = []
    convolutions: list[tuple[tuple[OpKind, Convolution], ...]] = []
    for ops in by_signature:
        if any(kind is OpKind.CONVOLUTION for kind, _ in ops):
            has_convolutions = True
            of_each = [(one, tuple(_answer(one, target))) for one in ops]
            answered.append(tuple(op for _, answers in of_each for op in answers))
            convolutions.append(
                tuple(
                    (kind, number)
                    for (_, number), answers in of_each
                    if isinstance(number, Convolution)
                    for kind, _ in answers
                )
            )
        else:
            answered.append(ops)  # type: ignore[arg-type]  # none of them is a convolution
            convolutions.append(())
    return KernelWorkspaces(cublas_bytes, tuple(answered), tuple(convolutions), has_convolutions)


def _answer(op: tuple[OpKind, int | Convolution], target: Target) -> Iterator[tuple[OpKind, int]]:
    kind, number = op
    if not isinstance(number, Convolution):
        yield kind, number
        return
    answer = target.conv_workspaces(number)
    if answer.searched_bytes:
        yield OpKind.AUTOTUNE, answer.searched_bytes
    if answer.workspace_bytes:
        yield OpKind.TRY, answer.workspace_bytes


def events_at(events: Sequence[ProgramEvent], batch: int) -> list[Event]:
    """Return a program's events as a trace's events, with their sizes at a batch size.

    The batch size is in the program's units.
    """
    return [
        Alloc(
            event.block,
            event.fixed_bytes + (event.bytes_per_sample + event.bytes_per_pair * batch) * batch,
            event.category,
            event.site,
            event.may_fail,
            event.stream,
        )
        if type(event) is AffineAlloc
        else event  # type: ignore[misc]  # mypy does not narrow by type()
        for event in events
    ]


def _calls_by_order(ops: Sequence[KernelOps]) -> tuple[Sequence[KernelOps], Sequence[KernelOps]]:
    """Return the operations of each signature's first call, and of later calls, which do not autotune."""
    if not any(kind is OpKind.AUTOTUNE for one in ops for kind, _ in one):
        return ops, ops
    return ops, [tuple(op for op in one if op[0] is not OpKind.AUTOTUNE) for one in ops]


def constant_program(trace: Trace, target: Target) -> Program:
    """Convert a trace to a program for its batch size only, on GPUs of the target's compute capability."""
    return Program(
        constant_events(trace.events),
        trace.sites,
        targets={target.capability: Variants(0, trace.batch, trace.batch, [])},
        unknown_ops=trace.unknown_ops,
        notes=trace.notes,
        facts=trace.facts,
        provenance=trace.provenance,
        conv_workspaces=trace.conv_workspaces,
        growth_sources=trace.growth_sources,
        pinned=tuple((size, 0) for size in trace.pinned),
    )


def constant_events(events: Sequence[Event]) -> tuple[ProgramEvent, ...]:
    """Convert trace events to program events of constant sizes."""
    return tuple(
        constant_alloc(event, event.block, event.site) if isinstance(event, Alloc) else event
        for event in events
    )


def constant_alloc(event: Alloc, block: int, site: int) -> AffineAlloc:
    """Convert an allocation to an `AffineAlloc` of constant size, with the numbers `block` and `site`."""
    return AffineAlloc(block, event.size_bytes, 0, event.category, site, event.may_fail, event.stream)


def validate_program(program: Program, batches: Sequence[int]) -> None:
    """Raise ValueError if a program is inconsistent.

    Fitted programs are always consistent. `batches` are in the program's units. The tensor events must form a
    valid trace at the first batch size. Sizes must be positive at all of `batches`, and no size may shrink as
    the batch grows. Kernel calls must be in order, each at the allocations of its outputs.
    """
    allocs = [event for event in program.events if isinstance(event, AffineAlloc)]
    for event in allocs:
        if event.bytes_per_pair < 0 or event.size_at(2) < event.size_at(1) or event.size_at(1) < 0:
            raise ValueError(f"the size of block {event.block} is negative at some batch size")
        if len(batches) == 1 and (event.bytes_per_sample or event.bytes_per_pair):
            raise ValueError(f"block {event.block} grows with the batch in a trace of one batch size")
    if program.unit < 1:
        raise ValueError(f"batch sizes in units of {program.unit}")
    if any(fixed + per_sample * batch <= 0 for fixed, per_sample in program.pinned for batch in batches):
        raise ValueError(f"batch sizes {batches}: a block of pinned memory without bytes")
    if min(batches) < 1 or any(event.size_at(batch) <= 0 for event in allocs for batch in batches):
        raise ValueError(f"batch sizes {batches}: not positive, or a block without bytes")
    events, rows = tuple(events_at(program.events, batches[0])), (program.provenance, program.conv_workspaces)
    validate(Trace(events, program.sites, batches[0], (), (), *rows))
    done = 0
    for call in program.calls:
        end = call.position + sum(call.outputs)
        if not 0 <= call.site < len(program.sites):
            raise ValueError(f"a kernel call at site {call.site}, which does not exist")
        if not done <= call.position <= end <= len(program.events):
            raise ValueError("kernel calls out of order")
        if not all(isinstance(event, AffineAlloc) for event in program.events[call.position : end]):
            raise ValueError("the output of a kernel call is no allocation")
        done = end


def sample_batches(min_batch: int, max_batch: int) -> Iterator[int]:
    """Yield the batch sizes from `min_batch` to `max_batch` at which rules are sampled.

    They are all sizes up to 16, then up to eight per doubling.
    """
    batch = min_batch
    while batch < max_batch:
        yield batch
        batch += max(1, batch // 8)
    yield max_batch
