"""The narrow waist: what a training process asked of the GPU's allocator, as plain data.

The tracer writes a `Trace`, everything after it only reads one. No algorithm stands here beyond the checks
that make a trace trustworthy; `affine.py` aligns traces, `replay.py` runs them, `trace_file.py` saves and
loads them.
"""

from dataclasses import dataclass
from enum import StrEnum

from planner.program.convolution import ConvWorkspace

RANDOM_COURSE = "random numbers on the CPU"  # stands in a note of traces in which chance decides conditions
FROM_CHANCE = "values drawn at random"  # stands in a note of every trace some of whose sizes come from chance


class Category(StrEnum):
    """What a block of memory is for; the categories of every breakdown."""

    PARAMETER = "parameters"  # weights and registered buffers
    GRADIENT = "gradients"  # storages behind `Parameter.grad`
    OPTIMIZER = "optimizer"  # state kept between steps
    INPUT = "inputs"  # the batch and its targets on the device
    ACTIVATION = "activations"  # born in the forward pass and still alive when the backward pass starts
    TEMPORARY = "temporaries"  # everything else that a tensor holds
    WORKSPACE = "workspaces"  # taken by kernels or libraries, held by no tensor


class Phase(StrEnum):
    """Where in the loop an event happens."""

    SETUP = "setup"  # the model is placed on the device
    INPUTS = "inputs"  # the batch is copied to the device
    FORWARD = "forward"  # includes the loss
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    END = "end"  # the loop is over, its names still alive


class Outcome(StrEnum):
    """Whether a batch fits; not fitting is a result like the others."""

    FITS = "yes"
    FITS_WITH_RETRIES = "with_retries"  # cached segments had to be released on the way, which costs time
    DOES_NOT_FIT = "no"


@dataclass(frozen=True, slots=True)
class Alloc:
    """A block is asked for: `fixed_bytes + per_sample_bytes * batch`, before the allocator rounds it."""

    block: int  # names the block for its `Free`; unique in a trace
    fixed_bytes: int
    per_sample_bytes: int
    role: Category
    site: int  # index into `Trace.sites`
    optional: bool = False  # where it is refused, the process goes another way, as if the block had no bytes

    def bytes_at(self, batch: int) -> int:
        """What is asked for at a batch size; loops that run for each event of many replays write it out."""
        return self.fixed_bytes + self.per_sample_bytes * batch


@dataclass(frozen=True, slots=True)
class Free:
    """The block is given back to the allocator."""

    block: int


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """From here on events belong to this phase of this step; steps count from 1, set-up is step 0."""

    step: int
    phase: Phase


Event = Alloc | Free | PhaseStart


@dataclass(frozen=True, slots=True)
class Site:
    """Who asked: the module's qualified name ("" outside any module) and the operator."""

    module: str
    op: str


@dataclass(frozen=True, slots=True)
class TensorProvenance:
    """What an explanation says of a block beyond its size; taken on demand and at one batch size only."""

    block: int
    shape: tuple[int, ...]
    dtype: str  # a torch dtype's name; "" where no tensor holds the block
    source: str  # FILE:LINE of the model's code behind it; "" where there is none
    code: str  # the text of that line


@dataclass(frozen=True, slots=True)
class GrowthSource:
    """Where blocks come from that become more with every step: a site, and the line of the model's code."""

    module: str
    op: str
    source: str  # FILE:LINE; "" where no code of the model's is behind it
    code: str  # the text of that line
    is_garbage: bool  # held by reference cycles alone, until Python's garbage collector runs


@dataclass(frozen=True, slots=True)
class Trace:
    """All events of a job's first steps, in order.

    `batches` says for which batch sizes the sizes hold: one number for a trace taken at that batch and
    valid only there (every `per_sample_bytes` is then 0), two or more for an affine trace, which holds for
    any batch and was fitted or confirmed at those.
    """

    events: tuple[Event, ...]
    sites: tuple[Site, ...]
    batches: tuple[int, ...]
    unknown_ops: tuple[
        str, ...
    ] = ()  # operators with neither a rule nor a declaration that they take no scratch
    notes: tuple[str, ...] = ()  # sentences that the answer must repeat: assumptions, departures from the job
    details: tuple[
        TensorProvenance, ...
    ] = ()  # of some blocks, by rising birth; none unless they were asked for
    asked: tuple[ConvWorkspace, ...] = ()  # the same of scratch memory of convolutions
    growth_sources: tuple[GrowthSource, ...] = ()  # of what grows from step to step; usually none

    @property
    def is_affine(self) -> bool:
        """Whether the trace holds for every batch size."""
        return len(self.batches) > 1


def check(trace: Trace) -> None:
    """Raise ValueError with the first flaw that makes a trace meaningless; a trace of the tracer has none.

    Blocks are born once, die at most once and after their birth, and have a known site; sizes are positive
    at the batch sizes that the trace speaks of and negative at none. Steps count up; nothing follows the end.
    Details are of blocks that are born, one for each, and never of an affine trace, whose shapes differ.
    """
    if not trace.batches or min(trace.batches) < 1:
        raise ValueError(f"batch sizes {trace.batches} are no positive numbers")
    alive: set[int] = set()
    born: set[int] = set()
    step = 0
    ended = False
    for index, event in enumerate(trace.events):
        if ended:
            raise ValueError(f"event {index}: something happens after the end")
        if isinstance(event, Alloc):
            if event.block in born:
                raise ValueError(f"event {index}: block {event.block} is born twice")
            if not 0 <= event.site < len(trace.sites):
                raise ValueError(f"event {index}: there is no site {event.site}")
            if not trace.is_affine and event.per_sample_bytes:
                raise ValueError(f"event {index}: sizes per sample in a trace of one batch size")
            if any(event.fixed_bytes + event.per_sample_bytes * batch <= 0 for batch in trace.batches):
                raise ValueError(f"event {index}: block {event.block} has no positive size")
            if event.per_sample_bytes < 0 or event.fixed_bytes + event.per_sample_bytes < 0:
                raise ValueError(f"event {index}: the size of block {event.block} is negative at some batch")
            alive.add(event.block)
            born.add(event.block)
        elif isinstance(event, Free):
            if event.block not in alive:
                raise ValueError(f"event {index}: block {event.block} dies without living")
            alive.remove(event.block)
        else:
            if event.step < step:
                raise ValueError(f"event {index}: step {event.step} comes after step {step}")
            step = event.step
            ended = event.phase is Phase.END
    if trace.is_affine and (trace.details or trace.asked):
        raise ValueError("details in a trace that holds for every batch size")
    for rows in (trace.details, trace.asked):
        blocks = [row.block for row in rows]
        if len(set(blocks)) < len(blocks) or not born.issuperset(blocks):
            raise ValueError("details are of one block each, and of blocks that are born")
