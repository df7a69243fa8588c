"""Convolutions as a library sees them, and the workspaces that it requests for them."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct
from msgspec.structs import astuple, fields, replace


class Direction(StrEnum):
    FORWARD = "forward"
    DATA = "data gradient"
    WEIGHT = "weight gradient"


class ConvWorkspaceSource(StrEnum):
    NONE = ""  # no convolution asked
    LIBRARY = "library"  # a cuDNN with all its engines
    STORED = "stored"  # answers of a cuDNN, stored for the very convolutions
    SIMILAR = "similar"  # some stored for similar ones, or a cuDNN without some of its engines
    PUBLISHED = "published"  # a term fitted to published runs
    UNCOUNTED = "uncounted"  # nothing, for any convolution


class WorkspaceAccount(Struct, frozen=True):
    """The source of a job's convolution workspaces, and the shares of convolutions with uncertain workspaces.

    Convolutions are weighted by the sizes of their operands.
    """

    source: ConvWorkspaceSource = ConvWorkspaceSource.NONE
    uncounted_share: float = 0.0  # of convolutions whose workspaces are not known
    far_share: float = 0.0  # of convolutions that borrow those of much larger or smaller ones
    notes: tuple[str, ...] = ()


class Convolution(Struct, frozen=True):
    """One call of a convolution: its direction, dtype, shapes and parameters.

    The forward pass of a transposed convolution is the data gradient of a convolution.
    """

    direction: Direction
    dtype: str  # float32, float64, float16 or bfloat16
    x: tuple[int, ...]  # N, C, then two or three extents
    w: tuple[int, ...]  # K, C / groups, then the kernel's extents
    y: tuple[int, ...]  # N, K, then the output's extents
    channels_last: bool
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


class ConvolutionExpr(Convolution, frozen=True):
    """A convolution with each size given as the index of a node of a `GuardedOps`."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return the nodes of all sizes of `x`, `w` and `y`, in order."""
        return (*self.x, *self.w, *self.y)

    def at(self, values: Sequence[int]) -> Convolution:
        """Return the convolution whose sizes are the values of the nodes."""
        x, w, y = (tuple([values[node] for node in nodes]) for nodes in (self.x, self.w, self.y))
        return Convolution(
            self.direction, self.dtype, x, w, y, self.channels_last, self.padding, self.stride, self.dilation
        )

    @classmethod
    def of(cls, convolution: Convolution, node_of: Callable[[int], int]) -> "ConvolutionExpr":
        """Return the expression of a convolution; `node_of` gives the node of a size."""
        x, w, y = (tuple(map(node_of, sizes)) for sizes in (convolution.x, convolution.w, convolution.y))
        return cls(*astuple(replace(convolution, x=x, w=w, y=y)))

    def moved(self, places: Mapping[int, int]) -> "ConvolutionExpr":
        """Return the expression with each node replaced by the node that `places` maps it to."""
        x, w, y = (tuple(places[node] for node in nodes) for nodes in (self.x, self.w, self.y))
        return replace(self, x=x, w=w, y=y)


class Engine(Struct, frozen=True):
    """One of cuDNN's engines for a convolution; `number` is its place in cuDNN's list."""

    number: int
    notes: tuple[str, ...]  # such as "tensor cores" or "Winograd"
    workspace_bytes: int


class Workspaces(Struct, frozen=True):
    """The workspaces that a library requests for one call of a convolution, in bytes."""

    workspace_bytes: int
    searched_bytes: int = 0  # more than that, the first time, while it times all its ways
    engine: Engine | None = None  # that takes the one
    searched: Engine | None = None  # that takes the other


class ConvWorkspace(Struct, frozen=True):
    """A table row that describes one workspace block and the convolution that uses the block."""

    block: int
    searched: bool  # room for the largest of all engines, while they are timed
    engine: int  # -1 where no library was queried
    notes: str  # the engine's, with commas between
    direction: Direction
    dtype: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    channels_last: bool
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def from_query(
        cls, block: int, query: Convolution, engine: Engine | None, *, searched: bool
    ) -> "ConvWorkspace":
        """Return the row of a block; `engine` is None if a fitted expression gives the workspace."""
        number, notes = (-1, "") if engine is None else (engine.number, ", ".join(engine.notes))
        return cls(block, searched, number, notes, **{name: getattr(query, name) for name in _OF_CONVOLUTION})

    @property
    def convolution(self) -> Convolution:
        """Return the convolution for which the library was queried."""
        return Convolution(**{name: getattr(self, name) for name in _OF_CONVOLUTION})


_OF_CONVOLUTION = tuple(column.name for column in fields(Convolution))


class ConvWorkspaceQuery(Protocol):
    """A source of convolution workspaces: a library, or a record of the library's results."""

    @property
    def name(self) -> str:
        """Return a name that differs between sources that may return different workspaces."""

    def __call__(self, capability: tuple[int, int], sm_count: int, convolution: Convolution) -> Workspaces:
        """Return the workspaces of a convolution on a GPU with this compute capability and number of SMs."""

    def following(
        self, capability: tuple[int, int], sm_count: int, convolution: Convolution, size_bytes: int
    ) -> tuple[int, ...] | None:
        """Return the sizes that PyTorch requests in turn if `size_bytes` is refused, or None if unknown."""

    def account(self, capability: tuple[int, int], sm_count: int) -> WorkspaceAccount:
        """Return the account of the workspaces returned so far for this capability and number of SMs."""
