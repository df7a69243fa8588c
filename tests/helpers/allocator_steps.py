"""Small histories through the allocator simulator, and what they come to."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.allocator.blocks import Block, SegmentEvent
from planner.allocator.caching_allocator import CachingAllocator
from planner.allocator.config import MIB, MemoryLimits, parse_alloc_conf


def mib(number: float) -> int:
    """Return that many MiB in bytes, exactly."""
    size_bytes = number * MIB
    assert size_bytes == int(size_bytes)
    return int(size_bytes)


FIRST_ADDRESS = 2**32


def rising() -> Callable[[int], int]:
    """Each segment lies above the one before: easier to read than the allocator's own falling addresses."""
    ends = [FIRST_ADDRESS]

    def address_of(size_bytes: int) -> int:
        ends.append(ends[-1] + size_bytes)
        return ends[-2]

    return address_of


Change = tuple[str, int, int]  # (action, address, size)
Step = tuple[str, int] | str


@dataclass(frozen=True)
class Result:
    """Totals of a history, in bytes; addresses count from the first one."""

    placed: dict[str, tuple[int, int] | None]  # name -> (address, size of the block); None: out of memory
    events: list[Change]
    allocated: int
    reserved: int
    peaks: tuple[int, int]  # allocated, reserved
    retries: int = 0
    ooms: int = 0


def replay(
    *steps: Step,
    conf: str = "",
    capacity: int | None = None,
    limit: int | None = None,
    total: int | None = None,
) -> Result:
    """Run a history: ("a", size) allocates a block named a, "-a" frees it, "empty_cache" does that."""
    log: list[SegmentEvent] = []
    allocator = CachingAllocator(
        MemoryLimits(capacity, limit, total, parse_alloc_conf(conf)),
        address_of=rising(),
        segment_events=log,
    )
    placed: dict[str, tuple[int, int] | None] = {}
    blocks: dict[str, Block] = {}
    for step in steps:
        if step == "empty_cache":
            allocator.empty_cache()
        elif isinstance(step, str):
            allocator.free(blocks.pop(step.removeprefix("-")))
        else:
            name, size = step
            block = allocator.malloc(size)
            placed[name] = None
            if block is not None:
                blocks[name] = block
                placed[name] = (block.address - FIRST_ADDRESS, block.size_bytes)
    return Result(
        placed=placed,
        events=[(action, address - FIRST_ADDRESS, size) for action, address, size in log],
        allocated=allocator.allocated_bytes,
        reserved=allocator.reserved_bytes,
        peaks=(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes),
        retries=allocator.retries,
        ooms=allocator.ooms,
    )


def alloc(address: float, size: float) -> Change:
    return "segment_alloc", mib(address), mib(size)


def release(address: float, size: float) -> Change:
    return "segment_free", mib(address), mib(size)
