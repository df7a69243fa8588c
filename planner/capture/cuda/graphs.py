"""Plan CUDA graphs that a user's step captures.

Operators during a capture allocate in a private pool. A graph keeps its pool, so that its replay allocates
nothing. `make_graphed_callables` runs unchanged (torch/cuda/graphs.py).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from planner.capture.cuda.callers import line_of_caller
from planner.capture.cuda.devices.queries import Stream
from planner.capture.cuda.names import Replacement
from planner.capture.cuda.streams import DEFAULT_STREAM, Streams
from planner.errors import ModelError
from planner.program import GRAPH_POOL

Handle = tuple[int, int]  # identifies a private pool


def _refuse(pool: int) -> AbstractContextManager[None]:
    raise ModelError(
        f"{line_of_caller()} captures a CUDA graph before the first step, which is not planned; capture it "
        "in the first call of the step, plan without it, or run the script: planner run -- python FILE"
    )


class Graphs:
    """The private pools of CUDA graphs in one run, and whether user code is capturing a graph."""

    def __init__(self) -> None:
        self.open_pool: Callable[[int], AbstractContextManager[None]] = _refuse  # or a recorder's method
        self.is_capturing = False
        self._default_stream: Stream | None = None
        self._pools = 0

    def new_pool(self) -> Handle:
        """Return the handle of a new private pool."""
        self._pools += 1
        return 0, self._pools

    def default_stream(self, streams: Streams) -> Stream:
        """Return the stream on which graphs are captured if user code gives no stream."""
        if self._default_stream is None:
            self._default_stream = Stream(streams, streams.make())
        return self._default_stream


def replacements(
    graphs: Callable[[], Graphs], streams: Callable[[], Streams], empty_cache: Callable[[], None]
) -> Iterator[Replacement]:
    """Yield replacements for the names of torch.cuda that capture CUDA graphs or query captures."""

    class CUDAGraph:
        """The replacement of `torch.cuda.CUDAGraph`, with a private pool and the state of random numbers.

        The state is allocated on the default stream (CUDAGeneratorState::init_capture_state,
        ATen/cuda/CUDAGeneratorImpl.cpp).
        """

        def __init__(self, keep_graph: bool = False) -> None:
            self._pool: Handle = (0, 0)
            self._state: list[Tensor] = []
            self._capture = ExitStack()

        def capture_begin(self, pool: Handle | None = None, *_: Any, **__: Any) -> None:
            if streams().current == DEFAULT_STREAM:
                raise RuntimeError("CUDA graphs must be captured on a non-default stream")
            self._pool = graphs().new_pool() if pool is None else pool
            opened = graphs().open_pool(GRAPH_POOL + self._pool[1])
            with Stream(streams(), DEFAULT_STREAM):
                self._state = [torch.empty(1, dtype=torch.int64, device="cuda") for _ in range(2)]
            graphs().is_capturing = True
            self._capture.enter_context(opened)

        def capture_end(self) -> None:
            self._capture.close()
            graphs().is_capturing = False

        def pool(self) -> Handle:
            return self._pool

        def replay(self) -> None:
            """Do nothing: a graph's memory is already allocated."""

        instantiate = reset = enable_debug_mode = replay

        def debug_dump(self, path: str) -> None:
            """Write no file."""

        def register_generator_state(self, generator: Any) -> None:
            """Do nothing: `capture_begin` allocates the state."""

    class Capture:
        """The replacement of `torch.cuda.graph`: it empties the cache and captures on a separate stream."""

        def __init__(
            self, cuda_graph: CUDAGraph, pool: Handle | None = None, stream: Any = None, *_: Any, **__: Any
        ) -> None:
            self._graph, self._pool = cuda_graph, pool
            self._stream = stream

        def __enter__(self) -> None:
            empty_cache()
            if self._stream is None:
                self._stream = graphs().default_stream(streams())
            self._stream.__enter__()
            self._graph.capture_begin(self._pool)

        def __exit__(self, *error: Any) -> None:
            self._graph.capture_end()
            self._stream.__exit__(*error)

    yield torch.cuda, "CUDAGraph", CUDAGraph
    yield torch.cuda, "graph", Capture
    for holder in (torch.cuda, torch.cuda.graphs):
        yield holder, "graph_pool_handle", lambda: graphs().new_pool()
        yield holder, "is_current_stream_capturing", lambda: graphs().is_capturing
