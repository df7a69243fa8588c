"""Events of a training process on the GPU's allocator, as plain data.

Capture writes a `Trace`, and all later stages only read it. The only algorithm in this module is `validate`,
which checks a trace; `fit` fits a program to two traces, and `planner.allocator` replays traces.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from planner.program.kernels.convolution import Convolution, ConvWorkspace, WorkspaceAccount, Workspaces

# Beginning of the notes on a part of the job that takes memory and is left out, which headlines repeat.
LEFT_OUT_NOTE = "not planned: "

# In place of a stream: the private memory pool of CUDA graphs, all captured on one stream. Pools of graphs
# that a user's code captures have the numbers after it.
GRAPH_POOL = 2**20


class Category(StrEnum):
    """The purpose of a memory block, as shown in memory breakdowns."""

    PARAMETER = "parameters"  # weights and registered buffers
    GRADIENT = "gradients"  # storages behind `Parameter.grad`
    OPTIMIZER = "optimizer"  # state that outlives a step
    INPUT = "inputs"  # the batch and its targets on the device
    ACTIVATION = "activations"  # born in the forward pass and still alive when the backward pass starts
    TEMPORARY = "temporaries"  # everything else that a tensor holds
    WORKSPACE = "workspaces"  # taken by kernels or libraries, held by no tensor


class Phase(StrEnum):
    """The phase of the loop in which an event happens."""

    SETUP = "setup"  # the model is placed on the device
    INPUTS = "inputs"  # the batch is copied to the device
    FORWARD = "forward"  # includes the loss
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"  # forward passes without gradients between the steps
    GATHERING = "gathering"  # between the steps, sharded weights are gathered to save them whole
    END = "end"  # the loop is over, its names still alive


class Fact(StrEnum):
    """A property of a trace that planning depends on. The trace's notes state it for the user."""

    RANDOM_SIZES = "random_sizes"  # some sizes depend on values that were drawn at random
    WEIGHTS_FROM_HOST = "weights_from_host"  # it resumes with weights that it loads onto the CPU
    EQUAL_PARTS = "equal_parts"  # all ranks hold equal parts, so the trace is the same on each
    REPEATED_BLOCKS = "repeated_blocks"  # extrapolated from traces of models with fewer blocks


class Outcome(StrEnum):
    """The outcome of a batch: it fits, fits with retries, or does not fit."""

    FITS = "yes"
    FITS_WITH_RETRIES = "with_retries"  # cached segments had to be released on the way, which costs time
    DOES_NOT_FIT = "no"

    def __bool__(self) -> bool:
        """Return whether the batch fits."""
        return self is not Outcome.DOES_NOT_FIT


class Alloc(Struct, frozen=True, gc=False):
    """The allocation of a block, with the requested size. The allocator rounds the size up later."""

    block: int  # names the block for its `Free`; unique in a trace
    size_bytes: int
    category: Category
    site: int  # index into `Trace.sites`
    may_fail: bool = False  # if it fails, the process requests another size: a convolution's workspace
    # For which it is allocated, 0 the default stream; blocks are cached by stream. From GRAPH_POOL on: graphs
    stream: int = 0


class Free(Struct, frozen=True, gc=False):
    """The event that frees a block."""

    block: int
    empties_cache: bool = False  # then the process releases all cached segments, as `torch.cuda.empty_cache`


class PhaseStart(Struct, frozen=True, gc=False):
    """The start of a phase of a step. Steps count from 1; step 0 is the set-up."""

    step: int
    phase: Phase


Event = Alloc | Free | PhaseStart


class Site(Struct, frozen=True):
    """The module and the operator that make an allocation.

    The module is a qualified name, or "" outside any module.
    """

    module: str
    op: str


class TensorProvenance(Struct, frozen=True):
    """The shape and dtype of a block's tensor, and its source line, recorded only on demand."""

    block: int
    shape: tuple[int, ...]
    dtype: str  # a torch dtype's name; "" if no tensor holds the block
    source: str  # FILE:LINE of the model's code behind it; "" if there is none
    code: str  # the text of that line


class GrowthSource(Struct, frozen=True):
    """The place that allocates more blocks with every step: module, operator and source line."""

    module: str
    op: str
    source: str  # FILE:LINE; "" if no code of the model is behind it
    code: str  # the text of that line
    is_garbage: bool  # held by reference cycles alone, until Python's garbage collector runs


# From a convolution and the size that it was refused to the sizes that PyTorch requests then, in turn; None
# if they are not known.
NextWorkspaces = Callable[[Convolution, int], Sequence[int] | None]
# From a convolution to its workspaces, as the GPU's library answers.
WorkspacesOf = Callable[[Convolution], Workspaces]


class Trace(Struct, frozen=True):
    """All events of a job's first steps at one batch size, in order."""

    events: tuple[Event, ...]
    sites: tuple[Site, ...]
    batch: int
    unknown_ops: tuple[str, ...] = ()  # with neither a workspace rule nor a note that they need none
    notes: tuple[str, ...] = ()  # sentences that the answer must repeat: assumptions, departures from the job
    provenance: tuple[TensorProvenance, ...] = ()  # of some blocks, by rising allocation; mostly none
    conv_workspaces: tuple[ConvWorkspace, ...] = ()  # of workspaces of convolutions, in that order
    growth_sources: tuple[GrowthSource, ...] = ()  # of memory that grows from step to step; usually none
    conv_account: WorkspaceAccount = WorkspaceAccount()  # how workspaces of convolutions are known
    convolutions: Mapping[int, Convolution] = {}  # by block, of traces that a program gives
    next_workspaces: NextWorkspaces | None = None  # after a refused workspace; None if unknown
    pinned: tuple[int, ...] = ()  # bytes of each block of pinned host memory, when they were most
    workspaces_of: WorkspacesOf | None = None  # the query that gave the workspaces of convolutions
    facts: frozenset[Fact] = frozenset()

    def convolution_by_block(self) -> Mapping[int, Convolution]:
        """Return a map from each block that is a convolution's workspace to the convolution."""
        return self.convolutions or {row.block: row.convolution for row in self.conv_workspaces}


def validate(trace: Trace) -> None:
    """Raise ValueError if a trace is inconsistent.

    The message names the first flaw. A captured trace has no flaws. Each block is allocated once, then freed
    at most once, and has an existing site; sizes are positive. Step numbers do not decrease, and nothing
    follows the end. Rows of provenance and of convolution workspaces name allocated blocks, each block at
    most once in a table.
    """
    if trace.batch < 1:
        raise ValueError(f"batch size {trace.batch} is not positive")
    alive: set[int] = set()
    allocated: set[int] = set()
    step = 0
    ended = False
    for index, event in enumerate(trace.events):
        if ended:
            raise ValueError(f"event {index}: something happens after the end")
        if isinstance(event, Alloc):
            if event.block in allocated:
                raise ValueError(f"event {index}: block {event.block} is allocated twice")
            if not 0 <= event.site < len(trace.sites):
                raise ValueError(f"event {index}: there is no site {event.site}")
            if event.size_bytes <= 0:
                raise ValueError(f"event {index}: block {event.block} has no positive size")
            alive.add(event.block)
            allocated.add(event.block)
        elif isinstance(event, Free):
            if event.block not in alive:
                raise ValueError(f"event {index}: block {event.block} is freed without being allocated")
            alive.remove(event.block)
        else:
            if event.step < step:
                raise ValueError(f"event {index}: step {event.step} comes after step {step}")
            step = event.step
            ended = event.phase is Phase.END
    for rows in (trace.provenance, trace.conv_workspaces):
        blocks = [row.block for row in rows]
        if len(set(blocks)) < len(blocks) or not allocated.issuperset(blocks):
            raise ValueError("provenance is of one block each, and of blocks that are allocated")
