"""The data types of the allocator simulator: blocks, block pools and snapshots."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Literal, NamedTuple

from msgspec import Struct

PoolName = Literal["small", "large"]
SegmentAction = Literal["segment_alloc", "segment_free", "segment_map", "segment_unmap"]


class SegmentEvent(NamedTuple):
    """A segment or pages that the allocator took from CUDA or returned to CUDA.

    `action` has the name in `torch.cuda.memory._record_memory_history`.
    """

    action: SegmentAction
    address: int
    size_bytes: int


class BlockState(Struct, frozen=True):
    """One block of a segment at the time of a snapshot: its address, its size and whether it is in use."""

    address: int
    size_bytes: int
    in_use: bool


class SegmentState(Struct, frozen=True):
    """One contiguous piece of reserved memory, with its blocks in ascending order of address."""

    address: int
    size_bytes: int
    pool: PoolName
    blocks: tuple[BlockState, ...]
    stream: int = 0

    @classmethod
    def of(cls, piece: "tuple[Block, ...]") -> "SegmentState":
        """Create the state of a piece from its adjacent blocks, none of them unmapped."""
        states = tuple(BlockState(block.address, block.size_bytes, block.in_use) for block in piece)
        size_bytes = sum(block.size_bytes for block in piece)
        pool = piece[0].pool
        return cls(piece[0].address, size_bytes, pool.name, states, pool.stream)


class Block:
    """A block of memory within a segment: in use, cached or unmapped.

    A cached block is free and in its pool's index. An unmapped block is a part of a virtual address range.
    `prev` and `next` are its neighbours in the segment. When two blocks merge, the object of the lower block
    remains. Free blocks of equal size are taken in ascending order of `rank`, which no two blocks share.
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
        self.rank = rank  # increases with the address within a segment
        self.size_bytes = size_bytes
        self.prev = prev
        self.next = next
        self.range_address = range_address  # start of the expandable segment; None in a segment of cudaMalloc
        self.in_use = False
        self.cached = False
        self.freed_at_search = 0  # number of searches before it was freed, for garbage collection

    @property
    def is_split(self) -> bool:
        """Return whether the block is only a part of its segment."""
        return self.prev is not None or self.next is not None

    def split_off(self, size_bytes: int) -> "Block":
        """Shrink the block to its lower `size_bytes`, and return the rest, neither cached nor in use."""
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
        """Merge `upper`, the next block, into this block.

        `upper` must be in no pool, and is invalid afterwards.
        """
        self.size_bytes += upper.size_bytes
        self.next = upper.next
        if upper.next is not None:
            upper.next.prev = self


class BlockPool:
    """The cached and unmapped blocks of one stream and size class, with the class's page and split sizes."""

    def __init__(
        self, name: PoolName, page_bytes: int, split_from_bytes: int, split_below_bytes: int, stream: int = 0
    ) -> None:
        self.name = name
        self.stream = stream
        self.page_bytes = page_bytes  # the step by which an expandable segment grows
        self.split_from_bytes = split_from_bytes  # a remainder of at least this size is split off ...
        self.split_below_bytes = split_below_bytes  # ... unless the request is at least this large
        # Sorted by (size, rank): the first block that is large enough is the best fit, and of the
        # blocks of its size the one with the lowest rank.
        self.cached: list[tuple[int, int, Block]] = []
        self.unmapped: list[Block] = []  # in ascending order of address

    def of_stream(self, stream: int) -> "BlockPool":
        """Return an empty pool for another stream, with the same name and sizes."""
        return BlockPool(self.name, self.page_bytes, self.split_from_bytes, self.split_below_bytes, stream)

    def insert(self, block: Block) -> None:
        """Add a free block to the cached blocks."""
        block.cached = True
        insort(self.cached, (block.size_bytes, block.rank, block))

    def remove(self, block: Block) -> None:
        """Remove a block from the cached blocks."""
        block.cached = False
        del self.cached[bisect_left(self.cached, (block.size_bytes, block.rank))]

    def insert_unmapped(self, block: Block) -> None:
        """Add an unmapped block, which must not be adjacent to another unmapped block."""
        insort(self.unmapped, block, key=attrgetter("address"))


def iterate_segment(head: Block) -> Iterator[Block]:
    """Yield the blocks of the segment that starts with `head`, in ascending order of address."""
    block: Block | None = head
    while block is not None:
        yield block
        block = block.next
