"""The result of a diagnosis: why a process ran out of GPU memory, and which settings would have helped."""

from enum import StrEnum

from msgspec import Struct


class Cause(StrEnum):
    """The cause of a failed memory request."""

    TOO_LARGE = "too_large"  # the job needs more than the GPU has
    ONE_REQUEST = "one_request"  # one request is larger than everything else together, or than the GPU
    FRAGMENTATION = "fragmentation"  # enough memory was reserved and unused, in pieces that are too small
    GROWTH = "growth"  # memory in use rises from step to step
    OTHER_PROCESS = "other_process"  # other processes hold the memory that was missing
    EVALUATION = "evaluation"  # training fits, an evaluation does not
    FIRST_STEP = "first_step"  # the optimizer allocates its state
    KERNEL = "kernel"  # a kernel asks for more shared memory than a multiprocessor has
    NO_FAILURE = "no_failure"  # no request failed
    UNKNOWN = "unknown"  # the file does not decide the cause


class Place(Struct, frozen=True):
    """The line of code and the operator that requested memory, each empty if unknown."""

    line: str = ""  # FILE:LINE, function
    operator: str = ""


class Held(Struct, frozen=True):
    """One group of allocations in use when the request failed, or at the peak if none failed."""

    what: str  # the code that allocated the group, or the name that a message gives to it
    size_bytes: int
    blocks: int = 0  # number of blocks; 0 if it is unknown


class Help(Struct, frozen=True):
    """A setting of the allocator, whether the same requests fit with it, and their reserved peak."""

    setting: str
    fits: bool | None  # None if the known figures do not decide it
    reserved_bytes: int | None = None  # the reserved peak with the setting; None if it is unknown
    reason: str = ""


class GpusServing(Struct, frozen=True):
    """The GPUs with the least memory on which recorded requests are served."""

    total_bytes: int  # of the first, as nvidia-smi shows it
    names: tuple[str, ...]  # GPUs with as many GiB, in ascending order of the memory left to the allocator
    reserved_bytes: int  # peak, on the first
    retries: int  # on the first
    too_small: str | None  # the GPU with the most memory that does not serve them; None if all GPUs do


class Diagnosis(Struct, frozen=True):
    """The cause of a failed request, if any, with sizes, memory in use and settings that would help.

    Sizes are None if the source does not name them.
    """

    source: str  # text that says what kind of file was diagnosed
    cause: Cause
    reason: str  # a sentence with the figures that decide the cause
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    total_bytes: int | None = None
    site: Place = Place()
    live: tuple[Held, ...] = ()  # memory in use, grouped by the code that allocated it
    by_category: tuple[Held, ...] = ()  # the same memory by category; empty if the source has no categories
    would_help: tuple[Help, ...] = ()
    notes: tuple[str, ...] = ()
    served_by: GpusServing | None = None  # None without a history, or if no known GPU serves its requests
    is_of_host: bool = False  # whether memory of the host ran out, not a GPU's; if so, the cause is UNKNOWN
    alloc_conf: str = "PYTORCH_ALLOC_CONF"  # the environment variable that takes the settings
    grown_by: Place = Place()  # the code that allocated most of the blocks that a growth added


def size_text(size_bytes: int) -> str:
    """Return a size as text in KiB, MiB or GiB.

    The unit is KiB below 0.1 MiB, GiB starting at 10 GiB, else MiB.
    """
    mib = size_bytes / 2**20
    if mib < 0.1:
        return f"{size_bytes / 1024:,.1f} KiB"
    return f"{mib / 1024:,.2f} GiB" if mib >= 10_240 else f"{mib:,.1f} MiB"


def retries_text(retries: int) -> str:
    """Return a number of retries as text, such as "2 retries"."""
    return "1 retry" if retries == 1 else f"{retries:,} retries"
