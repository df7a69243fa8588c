"""Read the figures of an out-of-memory message.

The wordings are from c10/cuda/CUDACachingAllocator.cpp in torch 1.0 to 2.13, from its counterparts for ROCm,
XPU and MPS, and from the libraries that report a failed allocation by a status alone.
"""

import re

from msgspec import Struct

from planner.planning.diagnosis.tracebacks import Frame
from planner.planning.diagnosis.without_figures import BACKENDS, WITHOUT_FIGURES, WithoutFigures, either

_BYTES = {"bytes": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ASYNC = "would exceed allowed memory"  # c10/cuda/CUDAMallocAsyncAllocator.cpp
_OF_OTHERS = re.compile("(?:XPU|NPU|MPS backend) out of memory")
MESSAGE = re.compile(rf"({BACKENDS}) out of memory|{_ASYNC}")
_FIGURES = {
    "requested": either("[Tt]ried to allocate SIZE", r"Requested\s*: SIZE", "Requested size: SIZE"),
    # torch 2.1 and 2.2 write "capacty"
    "total": either(
        "total capaci?ty of SIZE", "SIZE total capacity", "max allowed: SIZE", r"Device limit\s*: SIZE"
    ),
    "free": either("of which SIZE is free", "SIZE free", r"Free \(according to CUDA\): SIZE"),
    "allowed": either("SIZE allowed"),
    "allocated": either(
        "SIZE is allocated by PyTorch",
        "SIZE already allocated",
        "MPS allocated: SIZE",
        r"Currently allocated\s*: SIZE",  # cudaMallocAsync
    ),
    "unallocated": either("SIZE is reserved by PyTorch but unallocated", "SIZE cached"),
    "reserved": either("SIZE reserved in total by PyTorch"),
    "own": either("this process has SIZE memory in use"),
    "pools": either("SIZE allocated in private pools"),
    "metal": either("other allocations: SIZE"),
}
_LISTED = either(r"Process \d+ has SIZE memory in use")
_NOT_AVAILABLE_BYTES = 2**63  # NVML_VALUE_NOT_AVAILABLE of nvml.h and negative sizes are printed as more
_CONTEXT_BYTES = 2**30  # more than any published CUDA context that loads kernels on first use
# torch 1.12 loads all kernels: 1,690 MiB outside of its allocator on an RTX 3090 (docs/accuracy.md, timm),
# whose contexts of today are 260 MiB at the least (benchmarks/published/contexts.csv).
_ALL_KERNELS_BYTES = (1690 - 260) * 2**20
_PAGE_BYTES = 2**21  # CUDA maps memory of a GPU by whole pages of 2 MiB
_ROUNDING_BYTES = 2**30 // 100  # messages give GiB with two decimals


class Message(Struct, frozen=True):
    """An out-of-memory message with the traceback before it."""

    text: str
    frames: tuple[Frame, ...]

    def figure(self, name: str) -> int | None:
        """Return a figure, named by a key of `_FIGURES`, in bytes, or None if the message lacks it."""
        found = _FIGURES[name].search(self.text)
        return None if found is None else in_bytes(next(filter(None, found.groups())))

    @property
    def figures(self) -> tuple[int | None, ...]:
        """Return each figure of `_FIGURES` in bytes, or None if the message lacks it."""
        return tuple(map(self.figure, _FIGURES))

    @property
    def without_figures(self) -> tuple[WithoutFigures, re.Match[str]] | None:
        """Return the first pattern of `WITHOUT_FIGURES` that matches, and the match, or None."""
        searched = ((one, one.pattern.search(self.text)) for one in WITHOUT_FIGURES)
        return next(((one, found) for one, found in searched if found is not None), None)

    @property
    def detail(self) -> int | None:
        """Return how detailed the message is, from 0 to 4, or None if it matches no known wording.

        It is 4 if PyTorch's allocator names the requested and the allocated size, 3 if only the requested
        size, else the `detail` of the pattern of `WITHOUT_FIGURES` that the message matches.
        """
        if MESSAGE.search(self.text) is not None and self.figure("requested") is not None:
            return 3 if self.figure("allocated") is None else 4
        found = self.without_figures
        return None if found is None else found[0].detail

    @property
    def is_before_2_1(self) -> bool:
        """Return whether the message has the wording of torch for CUDA before 2.1."""
        return self.is_of_cuda and "already allocated" in self.text and "total capacity;" in self.text

    @property
    def reserved_bytes(self) -> int | None:
        """Return the bytes that PyTorch reserved, or None if they are unknown.

        They are as printed, or the sum of allocated and unallocated bytes; of Apple's GPUs, the allocated
        bytes. A message that was cut off may lack them, and with cudaMallocAsync the pools are the driver's.
        """
        allocated, unallocated = self.figure("allocated"), self.figure("unallocated")
        if self.is_of_cuda_pools:
            return None
        if self.is_of_metal:
            return allocated
        if allocated is None or unallocated is None:
            return self.figure("reserved")
        return allocated + unallocated

    @property
    def is_of_cuda_pools(self) -> bool:
        """Return whether the message is from cudaMallocAsync, which allocates from pools of the driver."""
        return _ASYNC in self.text

    @property
    def is_of_cuda(self) -> bool:
        """Return whether the message is from CUDA or ROCm, not from another backend."""
        return _OF_OTHERS.search(self.text) is None

    @property
    def is_of_metal(self) -> bool:
        """Return whether the allocator of Apple's GPUs wrote the message."""
        return self.figure("metal") is not None

    @property
    def free_bytes(self) -> int | None:
        """Return the bytes that PyTorch could still reserve, or None if they are missing.

        A limit of the process (`set_per_process_memory_fraction`) counts.
        """
        metal, total, allocated = (self.figure(name) for name in ("metal", "total", "allocated"))
        if metal is not None and total is not None and allocated is not None:
            return total - allocated - metal
        free, allowed, reserved = self.figure("free"), self.figure("allowed"), self.reserved_bytes
        if free is None or allowed is None or reserved is None:
            return free
        return min(free, max(0, allowed - reserved))

    @property
    def had_pages_free(self) -> bool:
        """Return whether the free bytes surely contained the whole pages that the failed request needs.

        The requested size is of the segment that torch asks for, in whole pages. What is free may end within
        pages that the driver uses, so that it surely has these pages if it has one page more.
        """
        requested, free = self.figure("requested"), self.figure("free")
        if requested is None or free is None:
            return False
        pages = -(-requested // _PAGE_BYTES)
        return free >= (pages + 1) * _PAGE_BYTES

    @property
    def left_bytes(self) -> int | None:
        """Return the free bytes plus the reserved but unallocated bytes, or None if a figure is missing."""
        free, allocated, reserved = self.free_bytes, self.figure("allocated"), self.reserved_bytes
        if free is None or allocated is None or reserved is None:
            return None
        return free + max(0, reserved - allocated)

    @property
    def own_bytes(self) -> int | None:
        """Return the bytes of the process whose request failed, or None if they are missing.

        The CUDA context is included. In a container torch does not recognize its own process in the driver's
        list, and the message lists it with the other processes. Then the smallest listed process with at
        least the reserved bytes counts.
        """
        own, reserved = self.figure("own"), self.reserved_bytes
        if own is not None:
            return own if own < _NOT_AVAILABLE_BYTES else None
        if reserved is None:
            return None
        return min((size for size in self._listed() if size + _ROUNDING_BYTES >= reserved), default=None)

    @property
    def other_bytes(self) -> int:
        """Return the total bytes of the processes that the message lists besides the failed process.

        It is 0 if a listed process may be this one, in a message that was cut off before it says so.
        """
        if self.figure("own") is not None:
            return sum(self._listed())
        return 0 if self.reserved_bytes is None else sum(self._listed()) - (self.own_bytes or 0)

    @property
    def outside_bytes(self) -> int | None:
        """Return the bytes in use outside of the failed process, or None if the message lacks a figure.

        If the size of the process is unknown, all bytes in use that its PyTorch did not reserve count.
        """
        total, free = self.figure("total"), self.figure("free")
        mine = self.reserved_bytes if self.own_bytes is None else self.own_bytes
        return None if total is None or free is None or mine is None else total - free - mine

    @property
    def unexplained_bytes(self) -> int:
        """Return the bytes in use outside of the failed process beyond a CUDA context, or 0 if unknown.

        The largest rounding error of the figures is subtracted: half of the last digit of each.
        """
        if not self.is_of_cuda:
            return 0
        kernels = _ALL_KERNELS_BYTES if self.is_before_2_1 else 0
        rounding = 2 * _ROUNDING_BYTES  # of four figures: the total, the free and at most two of this process
        return max(0, (self.outside_bytes or 0) - _CONTEXT_BYTES - kernels - rounding)

    def _listed(self) -> list[int]:
        sizes = map(in_bytes, _LISTED.findall(self.text))
        return [size for size in sizes if size < _NOT_AVAILABLE_BYTES]


def in_bytes(text: str) -> int:
    """Convert a size such as "64.00 MiB" to bytes, or return 0 if its number is malformed."""
    number, unit = re.findall(r"[\d.,]+|[A-Za-z]+", text)[:2]
    number = re.sub(r",(?=\d{3})", "", number).replace(",", ".")  # a comma may be of the locale
    try:
        return round(float(number) * _BYTES[unit if unit in _BYTES else unit[0]])
    except ValueError:  # such as "1.2.3"
        return 0
