"""Describe a GPU by a few figures, each with its origin.

`database.find_device` handles `--gpu NAME`, `generic_device` handles `--gpu-mib N`.
"""

from enum import StrEnum
from math import hypot

from msgspec import Struct

from planner.errors import UsageError
from planner.hardware.context import context_size, typical_context
from planner.program import Target

MIB = 2**20
UNLIMITED_BYTES = 2**60  # the "total" of a GPU of unlimited memory
SMALLEST_TOTAL_MIB = 100
LARGEST_TOTAL_MIB = 10_000_000


class FigureKind(StrEnum):
    """The kind of source of a figure, which tells how reliable it is."""

    MEASURED = "measured"  # by this project, on that GPU
    PUBLISHED = "published"  # by others, as tools print it: nvidia-smi, torch's logs and error messages
    DATASHEET = "datasheet"  # by the maker
    DERIVED = "derived"  # computed from figures of other GPUs
    UNVERIFIED = "unverified"  # from memory, without a source
    USER = "user"  # given on the command line


class SourcedBytes(Struct, frozen=True):
    """A size in bytes, with its source and its standard deviation."""

    value: int  # bytes
    source: str  # one phrase: "nvidia-smi", "torch 2.10 log", "derived from ...", "--gpu-mib"
    spread: int = 0  # one standard deviation, bytes; 0 if the figure is exact
    kind: FigureKind = FigureKind.UNVERIFIED


class SourcedValue(Struct, frozen=True):
    """A number from the device database, other than a size, with its source."""

    value: float
    source: str
    kind: FigureKind


class ProductLine(StrEnum):
    """The market that a GPU is made for. SLICE is a part of a GPU (MIG)."""

    CONSUMER = "consumer"
    WORKSTATION = "workstation"
    DATACENTER = "datacenter"
    SLICE = "slice"


class Vendor(StrEnum):
    """The maker of a GPU, which decides the libraries that torch calls."""

    NVIDIA = "nvidia"
    AMD = "amd"
    INTEL = "intel"


class ProductInfo(Struct, frozen=True):
    """A GPU's market, multiprocessors, memory type, bandwidth and cloud instances.

    The multiprocessors also decide the workspaces of some kernels.
    """

    line: ProductLine
    multiprocessors: SourcedValue | None = None  # None if no source is known
    memory_type: str = ""  # such as GDDR6X
    bandwidth: SourcedValue | None = None  # GB/s, of 10**9 bytes
    instances: tuple[str, ...] = ()  # names of cloud instances that have the GPU
    instances_source: str = ""


class Device(Struct, frozen=True):
    """A GPU with the figures that plans need: memory sizes, CUDA context, compute capability and others.

    It is from the database, from this machine, or given by its memory alone.
    """

    name: str
    total: SourcedBytes  # as nvidia-smi shows it
    usable: SourcedBytes  # torch's total memory: `total` minus the memory that the driver keeps
    context: SourcedBytes  # CUDA context and loaded kernels of a training process, after its third step
    capability: tuple[int, int]  # compute capability; decides kernels and the cuBLAS workspace
    aliases: tuple[str, ...] = ()
    capability_source: str = "assumed"
    about: ProductInfo | None = None  # None if the GPU's file has no such facts
    nccl: SourcedBytes | None = None  # NCCL's own memory in a job of several GPUs; None on one GPU
    vendor: Vendor = Vendor.NVIDIA

    @property
    def outside(self) -> tuple[int, float]:
        """Return the bytes of a process's CUDA context and of NCCL, and their standard deviation."""
        if self.nccl is None:
            return self.context.value, self.context.spread
        return self.context.value + self.nccl.value, hypot(self.context.spread, self.nccl.spread)

    @property
    def target(self) -> Target:
        """Return the compute capability and number of multiprocessors, which decide the kernels that run.

        If the number of multiprocessors is unknown, the number of the largest GPU of the capability is taken.
        """
        count = None if self.about is None else self.about.multiprocessors
        return Target.for_capability(self.capability, None if count is None else round(count.value))


# A straight line through `total - usable` of the GPUs in devices/*.yaml, and the deviation from it;
# benchmarks/fits/generic_device.py prints them.
DRIVER_MIB = 398
DRIVER_SHARE = 0.0023
DRIVER_SPREAD_MIB = 98
GENERIC_CAPABILITY = (8, 6)  # Ampere, assumed for unknown GPUs


def _derived(mib: int, spread_mib: int, source: str) -> SourcedBytes:
    return SourcedBytes(mib * MIB, source, spread_mib * MIB, FigureKind.DERIVED)


GENERIC_CONTEXT = _derived(
    *typical_context(),
    "that of the median GPU: published contexts (torch >= 2.1) grow with the multiprocessors",
)


def generic_context(capability: tuple[int, int], about: ProductInfo | None) -> SourcedBytes:
    """Return the CUDA context estimated from the multiprocessors in `about`, or the median GPU's context.

    The median is used if the number of multiprocessors is unknown.
    """
    if about is None or about.multiprocessors is None:
        return GENERIC_CONTEXT
    count = round(about.multiprocessors.value)
    source = f"line through published contexts (torch >= 2.1) of 12 GPUs, at {count} multiprocessors"
    return _derived(*context_size(capability, count), source)


def generic_usable(total_bytes: int) -> SourcedBytes:
    """Return the total memory that torch reports for a GPU, estimated from nvidia-smi's total, `total_bytes`.

    It is 398 MiB and 0.23 % less.
    """
    reserved_bytes = DRIVER_MIB * MIB + round(DRIVER_SHARE * total_bytes)
    source = f"total less {DRIVER_MIB} MiB and {DRIVER_SHARE:.2%}: the known GPUs' line"
    spread_bytes = DRIVER_SPREAD_MIB * MIB
    return SourcedBytes(max(0, total_bytes - reserved_bytes), source, spread_bytes, FigureKind.DERIVED)


def generic_device(total_mib: int) -> Device:
    """Return a generic GPU with a total memory of `total_mib` MiB in nvidia-smi.

    Raises UsageError below 100 and above 10,000,000 MiB.
    """
    if not SMALLEST_TOTAL_MIB <= total_mib <= LARGEST_TOTAL_MIB:
        raise UsageError(
            f"a GPU of {total_mib} MiB makes no sense: give its total memory in MiB as nvidia-smi shows it, "
            f"from {SMALLEST_TOTAL_MIB} to {LARGEST_TOTAL_MIB}"
        )
    total = SourcedBytes(total_mib * MIB, "given by the user", kind=FigureKind.USER)
    return _ampere(f"generic GPU of {total_mib} MiB", total, generic_usable(total.value))


def unlimited_device() -> Device:
    """Return a GPU of unlimited memory with a generic context, for an estimate that names no GPU."""
    endless = SourcedBytes(UNLIMITED_BYTES, "no GPU given", kind=FigureKind.USER)
    return _ampere("unlimited", endless, endless)


def _ampere(name: str, total: SourcedBytes, usable: SourcedBytes) -> Device:
    source = "assumed: an Ampere GPU"
    return Device(name, total, usable, GENERIC_CONTEXT, GENERIC_CAPABILITY, capability_source=source)
