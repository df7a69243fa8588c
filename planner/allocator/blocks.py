"""The nouns of the allocator simulator: blocks, the pools that cache them, frozen pictures of both."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Literal, NamedTuple

from msgspec import Struct

PoolName = Literal["small", "large"]
SegmentAction = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]


class SegmentEvent(NamedTuple):
    """A change of the reserved memory, named as in `torch.cuda.memory._record_memory_history`."""

    action: SegmentAction
    address: int
    size_bytes: int


class BlockState(Struct, frozen=True):
    """One block of a segment at the moment of a snapshot."""

    address: int
    size_bytes: int
    in_use: bool


class SegmentState(Struct, frozen=True):
    """One contiguous piece of reserved memory and the blocks that tile it, by rising address."""

    address: int
    size_bytes: int
    pool: PoolName
    blocks: tuple[BlockState, ...]
    stream: int = 0

    @classmethod
    def of(cls, piece: "tuple[Block, ...]") -> "SegmentState":
        """Return the state of neighbours of which each is in use or cached."""
        states = tuple(BlockState(block.address, block.size_bytes, block.in_use) for block in piece)
        size_bytes = sum(block.size_bytes for block in piece)
        pool = piece[0].pool
        return cls(piece[0].address, size_bytes, pool.name, states, pool.stream)


class Block:
    """A piece of a segment: in use, cached (free, in its pool's index), or an unmapped part of a range.

    `prev` and `next` are its neighbours in the segment. Of two blocks that merge, the lower one lives on.
    Free blocks of equal size are taken by rising `rank`, which no two blocks share.
    """

    def __init__(
        self,
        pool: "BlockPool",
        address: int,
        rank: int,
        size_bytes: int,
        prev: "Block | None" = None,
        next: "Block | None" = None,
        range_address: int | None = None,
    ) -> None:
        self.pool = pool
        self.address = address
        self.rank = rank  # rises with the address within a segment
        self.size_bytes = size_bytes
        self.prev = prev
        self.next = next
        self.range_address = range_address  # of the expandable segment; None: the segment is one cudaMalloc
        self.in_use = False
        self.cached = False
        self.freed_at_search = 0  # the count of searches at that time; garbage collection reads it

    @property
    def is_split(self) -> bool:
        """Return whether the block is only a part of its segment."""
        return self.prev is not None or self.next is not None

    def split_off(self, size_bytes: int) -> "Block":
        """Keep the lower `size_bytes`; return the rest as a new block behind, neither cached nor in use."""
        rest_bytes = self.size_bytes - size_bytes
        upper = self.next
        rest = Block(
            self.pool,
            self.address + size_bytes,
            self.rank + size_bytes,
            rest_bytes,
            self,
            upper,
            self.range_address,
        )
        if upper is not None:
            upper.prev = rest
        self.next = rest
        self.size_bytes = size_bytes
        return rest

    def absorb(self, upper: "Block") -> None:
        """Take over the neighbour behind, which must be in no index any more and is dead afterwards."""
        self.size_bytes += upper.size_bytes
        self.next = upper.next
        if upper.next is not None:
            upper.next.prev = self


class BlockPool:
    """The cached blocks of one size class (small or large) and stream, and the rules of the class."""

    def __init__(
        self, name: PoolName, page_bytes: int, split_from_bytes: int, split_below_bytes: int, stream: int = 0
    ) -> None:
        self.name = name
        self.stream = stream
        self.page_bytes = page_bytes  # what an expandable segment grows by
        self.split_from_bytes = split_from_bytes  # a remainder this large becomes a block of its own ...
        self.split_below_bytes = split_below_bytes  # ... unless the request is this large
        # Best fit, and of equal blocks the first by the rules, is the order of (size, rank).
        self.cached: list[tuple[int, int, Block]] = []
        self.unmapped: list[Block] = []  # by rising address

    def of_stream(self, stream: int) -> "BlockPool":
        """Return an empty pool with the same rules for another stream."""
        return BlockPool(self.name, self.page_bytes, self.split_from_bytes, self.split_below_bytes, stream)

    def insert(self, block: Block) -> None:
        """Cache a block."""
        block.cached = True
        insort(self.cached, (block.size_bytes, block.rank, block))

    def remove(self, block: Block) -> None:
        """Take a cached block out."""
        block.cached = False
        del self.cached[bisect_left(self.cached, (block.size_bytes, block.rank))]

    def insert_unmapped(self, block: Block) -> None:
        """Add an unmapped block, which must have no unmapped neighbour."""
        insort(self.unmapped, block, key=attrgetter("address"))


def iterate_segment(head: Block) -> Iterator[Block]:
    """Yield the blocks of the segment that starts with `head`, by rising address."""
    block: Block | None = head
    while block is not None:
        yield block
        block = block.next
