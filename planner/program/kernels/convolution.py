"""Calls of convolutions in cuDNN, and the workspaces that cuDNN requests for the calls."""

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
    NONE = ""  # the job has no convolution
    LIBRARY = "library"  # an installed cuDNN with all its engines
    STORED = "stored"  # stored answers of cuDNN for exactly these convolutions
    SIMILAR = "similar"  # stored answers for similar convolutions, or a cuDNN that lacks some engines
    PUBLISHED = "published"  # a term fitted to published runs
    UNCOUNTED = "uncounted"  # no workspace is counted for any convolution


class WorkspaceAccount(Struct, frozen=True):
    """The source of a job's convolution workspaces, and the shares of convolutions that are uncertain.

    A share is weighted by the sizes of the convolutions' operands.
    """

    source: ConvWorkspaceSource = ConvWorkspaceSource.NONE
    uncounted_share: float = 0.0  # the share of convolutions whose workspaces are not known
    far_share: float = 0.0  # the share with workspaces of much larger or smaller convolutions
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
    """A convolution whose sizes are nodes of a `GuardedOps`. Sizes are indices of nodes."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """Return the indices of the nodes of all sizes: of `x`, `w` and `y`."""
        return (*self.x, *self.w, *self.y)

    def at(self, values: Sequence[int]) -> Convolution:
        """Return the convolution with each node replaced by its value. `values` are by index of the node."""
        x, w, y = (tuple([values[node] for node in nodes]) for nodes in (self.x, self.w, self.y))
        return Convolution(
            self.direction, self.dtype, x, w, y, self.channels_last, self.padding, self.stride, self.dilation
        )

    @classmethod
    def of(cls, convolution: Convolution, node_of: Callable[[int], int]) -> "ConvolutionExpr":
        """Convert a convolution to an expression. `node_of` returns the node index for a size."""
        x, w, y = (tuple(map(node_of, sizes)) for sizes in (convolution.x, convolution.w, convolution.y))
        return cls(*astuple(replace(convolution, x=x, w=w, y=y)))

    def moved(self, places: Mapping[int, int]) -> "ConvolutionExpr":
        """Return the expression with each node index mapped by `places`."""
        x, w, y = (tuple(places[node] for node in nodes) for nodes in (self.x, self.w, self.y))
        return replace(self, x=x, w=w, y=y)


class Engine(Struct, frozen=True):
    """One of cuDNN's engines for a convolution. `number` is the engine's index in cuDNN's list."""

    number: int
    notes: tuple[str, ...]  # such as "tensor cores" or "Winograd"
    workspace_bytes: int


class Workspaces(Struct, frozen=True):
    """The workspaces that a library requests for one call of a convolution, in bytes."""

    workspace_bytes: int
    searched_bytes: int = 0  # in the first call, while the library times all its engines; 0 if it does not
    engine: Engine | None = None  # the engine that takes `workspace_bytes`
    searched: Engine | None = None  # the engine that takes `searched_bytes`


class ConvWorkspace(Struct, frozen=True):
    """A table row for one workspace block and the convolution that uses it."""

    block: int
    searched: bool  # whether the block serves the timing of all engines
    engine: int  # the engine's number; -1 if no library was queried
    notes: str  # the engine's notes, separated by commas
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
        """Create the row of a workspace block from the queried convolution.

        `engine` is None if a fitted expression gives the workspace.
        """
        number, notes = (-1, "") if engine is None else (engine.number, ", ".join(engine.notes))
        return cls(block, searched, number, notes, **{name: getattr(query, name) for name in _OF_CONVOLUTION})

    @property
    def convolution(self) -> Convolution:
        """Return the convolution that uses the block."""
        return Convolution(**{name: getattr(self, name) for name in _OF_CONVOLUTION})


_OF_CONVOLUTION = tuple(column.name for column in fields(Convolution))


class ConvWorkspaceQuery(Protocol):
    """A source of convolution workspaces: a library, or a record of the library's results."""

    @property
    def name(self) -> str:
        """Return the name of the source.

        Sources that may return different workspaces have different names.
        """

    def __call__(self, capability: tuple[int, int], sm_count: int, convolution: Convolution) -> Workspaces:
        """Return the workspaces of a convolution on a GPU.

        The GPU has the compute capability `capability` and `sm_count` SMs.
        """

    def following(
        self, capability: tuple[int, int], sm_count: int, convolution: Convolution, size_bytes: int
    ) -> tuple[int, ...] | None:
        """Return the sizes that PyTorch requests after `size_bytes` is refused, or None if unknown."""

    def account(self, capability: tuple[int, int], sm_count: int) -> WorkspaceAccount:
        """Return the source and the uncertainty of all workspaces returned for a GPU.

        The GPU has the compute capability `capability` and `sm_count` SMs.
        """
