"""The bytes of pinned memory that torch takes on the host."""

from collections.abc import Iterable


def pinned_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of host memory that torch pins for blocks of the given sizes.

    Each size is rounded up to a power of two. Source: ATen/core/CachingHostAllocator.h, `allocate`.

    >>> pinned_bytes([1, 3, 1024, 1025])
    3077
    """
    return sum(1 << (size - 1).bit_length() for size in sizes)
