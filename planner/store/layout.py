"""The layout of a file of programs: one struct per JSON object.

Tables are stored by columns.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from planner.program import Category, Direction, Fact, Phase

LARGEST_NUMBER = 2**63 - 1  # the largest integer of torch

Int = Annotated[int, Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Bits = Annotated[str, Meta(pattern="^[01]*$")]
About = dict[str, Any]  # the JSON data of a file besides its programs


class SiteColumns(Struct, forbid_unknown_fields=True):
    module: list[str]
    op: list[str]


class AllocColumns(Struct, forbid_unknown_fields=True, omit_defaults=True):
    block: list[Int]
    fixed_bytes: list[Int]
    per_sample_bytes: list[Int]
    role: list[Category]
    site: list[Int]
    optional: list[bool] | None = None
    stream: list[Int] | None = None  # None if all blocks are on the default stream
    per_pair_bytes: list[Int] | None = None


class FreeColumns(Struct, forbid_unknown_fields=True):
    block: list[Int]


class PhaseColumns(Struct, forbid_unknown_fields=True):
    step: list[Int]
    phase: list[Phase]


class ProvenanceColumns(Struct, forbid_unknown_fields=True):
    block: list[Int]
    shape: list[tuple[Int, ...]]
    dtype: list[str]
    source: list[str]
    code: list[str]


class ConvolutionColumns(Struct, forbid_unknown_fields=True):
    block: list[Int]
    searched: list[bool]
    engine: list[Int]
    notes: list[str]
    direction: list[Direction]
    dtype: list[str]
    x: list[tuple[Int, ...]]
    w: list[tuple[Int, ...]]
    y: list[tuple[Int, ...]]
    channels_last: list[bool]
    padding: list[tuple[Int, ...]]
    stride: list[tuple[Int, ...]]
    dilation: list[tuple[Int, ...]]


class GrowthColumns(Struct, forbid_unknown_fields=True):
    module: list[str]
    op: list[str]
    source: list[str]
    code: list[str]
    is_garbage: list[bool]


class EventsObject(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """JSON object with a program's tensor events, their sites, notes and other facts of its trace."""

    batches: Annotated[list[Int], Meta(min_length=1)]
    unknown_ops: list[str]
    notes: list[str]
    sites: SiteColumns
    kind: Annotated[str, Meta(pattern="^[aefm]*$")]
    alloc: AllocColumns
    free: FreeColumns
    mark: PhaseColumns
    details: ProvenanceColumns | None = None
    asked: ConvolutionColumns | None = None
    growth_sources: GrowthColumns | None = None
    pinned: list[list[Int]] = []  # fixed bytes and bytes per sample of each pinned host block
    unit: int = 1  # number of samples of which all batch sizes are multiples
    facts: list[Fact] = []


class CallColumns(Struct, forbid_unknown_fields=True, omit_defaults=True):
    kind: list[Int]  # number of the call's signature
    site: list[Int]
    before: list[Int]  # position of the call minus the position of the previous call
    outputs: list[Int]  # index into `KernelsObject.outputs`
    takes_blas: list[Int]  # indices of the calls in which cuBLAS allocates its workspace
    stream: list[Int] | None = None  # None if all calls are on the default stream


class TargetObject(Struct, forbid_unknown_fields=True):
    blas_bytes: Int
    first: Int
    last: Int
    cases: list[list[Int]]  # for each signature, indices into the pool


# The smallest and largest batch size; operations, left and right operands of the nodes; comparisons of the
# guards, and three numbers for each guard; kinds and nodes of the allocator operations.
VariantArray = tuple[Int, Int, str, list[Int], list[Int], str, list[Int], str, list[Int]]


# Direction, type, nodes of the sizes of x, w and y, channels last, padding, stride and dilation.
Sizes = tuple[Int, ...]
ConvolutionArray = tuple[Direction, str, Sizes, Sizes, Sizes, bool, Sizes, Sizes, Sizes]


class KernelsObject(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """JSON object with a program's kernel calls and their workspaces.

    Variants of the workspaces are stored by compute capability.
    """

    outputs: list[Bits]
    kernels: CallColumns
    pool: list[VariantArray]
    chips: dict[str, TargetObject]
    convolutions: dict[int, list[ConvolutionArray]] = {}  # by the variant's index into the pool


class ProgramDocument(Struct, forbid_unknown_fields=True):
    format: int
    about: About
    traces: list[EventsObject]
    loops: list[KernelsObject]


class AnyDocument(Struct):
    format: int
