"""Track the current CUDA stream of a captured process.

An operator's memory is allocated on the stream.
"""

from bisect import bisect_right
from collections import Counter
from operator import itemgetter

import torch

from planner.program import STREAM_POOL

DEFAULT_STREAM = 0
_LEAF_NODE = 2**63  # sequence numbers of nodes that accumulate into leaves are above it


class Streams:
    """A tracker of the current CUDA stream, in Python code and in the nodes of backward passes.

    Autograd runs a node on the stream of its forward operator (autograd/engine.cpp), unless Python code in
    the node enters another stream.
    """

    def __init__(self) -> None:
        self._made: Counter[int] = Counter()  # number of streams made, by priority
        # Each entered stream, with the autograd node that ran when the stream was entered, or None.
        self._entered: list[tuple[int, int | None]] = [(DEFAULT_STREAM, None)]
        # The first sequence number of the nodes made on a stream, with the stream.
        self._changes: list[tuple[int, int]] = [(0, DEFAULT_STREAM)]

    def make(self, priority: int = 0) -> int:
        """Return the number of a new stream: the next one in the pool of its priority."""
        self._made[priority] += 1
        return 1 + (self._made[priority] - 1) % STREAM_POOL + STREAM_POOL * -priority

    def enter(self, stream: int) -> None:
        """Make a stream current until `leave` is called."""
        self._entered.append((stream, _running_node()))
        self._note_change(stream)

    def leave(self) -> None:
        """Make the previously entered stream current again."""
        self._entered.pop()
        self._note_change(self._entered[-1][0])

    def set(self, stream: int) -> None:
        """Replace the current stream. Needs no matching `leave`."""
        self._entered[-1] = stream, _running_node()
        self._note_change(stream)

    @property
    def current(self) -> int:
        """Return the number of the stream that receives work now."""
        if not self._made:
            return DEFAULT_STREAM
        stream, entered_in = self._entered[-1]
        node = _running_node()
        if node is None or node == entered_in:
            return stream
        if node > _LEAF_NODE:
            return DEFAULT_STREAM
        return self._changes[bisect_right(self._changes, node, key=itemgetter(0)) - 1][1]

    def _note_change(self, stream: int) -> None:
        """Record that autograd nodes made from now on belong to a stream."""
        number = torch._C._autograd._get_sequence_nr()
        while self._changes and self._changes[-1][0] >= number:
            self._changes.pop()
        self._changes.append((number, stream))


def _running_node() -> int | None:
    """Return the sequence number of the running autograd node, or None if none runs."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()
