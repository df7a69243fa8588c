"""The configuration of PyTorch's CUDA caching allocator, and its rounding of sizes.

The options come from the environment variable PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF before torch 2.10),
as torch 2.11 to 2.13 read it. Constants and checks: AllocatorConfig.h and .cpp in c10/core,
CUDAAllocatorConfig.h and .cpp in c10/cuda; rounding: `round_size` and `get_allocation_size` in
c10/cuda/CUDACachingAllocator.cpp.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import UsageError
from planner.program import torch_version_of

MIB: Final = 2**20

# c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kRoundLarge
BLOCK_ROUNDING_BYTES: Final = 512
LARGEST_SMALL_BYTES: Final = 1 * MIB
SMALL_SEGMENT_BYTES: Final = 2 * MIB
OWN_SEGMENT_BYTES: Final = 10 * MIB
SEGMENT_ROUNDING_BYTES: Final = 2 * MIB
# c10/core/AllocatorConfig.h: large_segment_size_, before torch 2.11 the constant kLargeBuffer
DEFAULT_LARGE_SEGMENT_BYTES: Final = 20 * MIB
# c10/core/AllocatorConfig.cpp: one entry per power of two, starting at 1 MiB; the last serves all larger
# sizes
DIVISION_CLASSES: Final = 16
FIRST_DIVISION_CLASS_LOG2: Final = 20
_OLDEST_SEGMENT_SINCE: Final = (2, 12)
_MOST_DIGITS: Final = 18  # the most digits of a number that torch would read


class ReuseOrder(StrEnum):
    """The rules by which torch chooses among free blocks of equal size."""

    OLDEST_SEGMENT = "oldest segment"  # torch 2.12 and later (pytorch/pytorch#183591)
    LOWEST_ADDRESS = "lowest address"  # before torch 2.12


class AllocatorConfig(Struct, frozen=True):
    """The options of the allocator that affect device memory.

    `parse_alloc_conf` parses their text. The defaults are torch 2.13's; `config_of_torch` returns the
    defaults of other versions since 2.6, in which only `reuse_order` differs. The defaults of newer options
    (`large_segment_size_mb` of 2.11, `throw_on_cudamalloc_oom` of 2.12) are the fixed behaviour of older
    versions.
    """

    # Blocks of at least this size are never split, and serve no smaller request; None if all may be split.
    max_split_bytes: int | None = None
    # An unsplittable block is used only if it wastes less than this.
    max_non_split_rounding_bytes: int = DEFAULT_LARGE_SEGMENT_BYTES
    # The segment size for a request between 1 and 10 MiB, and the page size of expandable segments in the
    # large pool.
    large_segment_bytes: int = DEFAULT_LARGE_SEGMENT_BYTES
    # Number of steps between two powers of two, by floor(log2(size)): the first entry is for sizes below 2
    # MiB, the last for sizes of at least 32 GiB. With 0 or 1, sizes are rounded to 512 bytes.
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISION_CLASSES
    # Fraction of the memory limit above which old cached segments are released; with 0, or without a limit,
    # they are not.
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    # Memory limit as a fraction of the device's total memory; 1 sets no limit.
    per_process_memory_fraction: float = 1.0
    # Whether a request beyond that limit fails immediately, without a release of cached memory.
    throw_on_cudamalloc_oom: bool = False
    reuse_order: ReuseOrder = ReuseOrder.OLDEST_SEGMENT

    def block_bytes(self, requested_bytes: int) -> int:
        """Round a request of `requested_bytes` > 0 up to the size of the block that serves it."""
        if requested_bytes >= BLOCK_ROUNDING_BYTES:
            size_class = requested_bytes.bit_length() - 1 - FIRST_DIVISION_CLASS_LOG2
            divisions = self.roundup_power2_divisions[min(max(size_class, 0), DIVISION_CLASSES - 1)]
            if divisions > 1 and requested_bytes > BLOCK_ROUNDING_BYTES * divisions:
                return _next_division(requested_bytes, divisions)
        return round_up(requested_bytes, BLOCK_ROUNDING_BYTES)

    def segment_bytes(self, block_bytes: int) -> int:
        """Return the size of the new segment to request for a block."""
        if block_bytes <= LARGEST_SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return round_up(block_bytes, SEGMENT_ROUNDING_BYTES)

    def memory_limit_bytes(self, device_total_bytes: int) -> int | None:
        """Return the memory limit for `per_process_memory_fraction`, or None if the fraction is 1.

        The arithmetic follows `set_per_process_memory_fraction`, with `total_memory` of the device
        properties.
        """
        if self.per_process_memory_fraction >= 1.0:
            return None
        return int(self.per_process_memory_fraction * device_total_bytes)


class MemoryLimits(Struct, frozen=True):
    """The limits of the memory that the allocator may reserve, with the allocator's configuration."""

    capacity_bytes: int | None = None  # the most that CUDA can provide; None if unlimited
    limit_bytes: int | None = None  # set by `set_per_process_memory_fraction`; None if not called
    # The device's memory as torch reports it; the fraction in `config` is a fraction of it.
    total_bytes: int | None = None
    config: AllocatorConfig = AllocatorConfig()

    @property
    def process_limit_bytes(self) -> int | None:
        """Return the process's memory limit in bytes, or None if there is no limit.

        The fraction in `config` counts only if `limit_bytes` is None and `total_bytes` is given.
        """
        if self.limit_bytes is not None or self.total_bytes is None:
            return self.limit_bytes
        return self.config.memory_limit_bytes(self.total_bytes)

    @property
    def allocator_limit_bytes(self) -> int | None:
        """Return the smaller of the capacity and the process limit, or None if there is neither."""
        return _least(self.capacity_bytes, self.process_limit_bytes)


UNLIMITED = MemoryLimits()


def max_reserved_bytes(limits: MemoryLimits) -> int | None:
    """Return the most bytes that the allocator can reserve, or None if that is unlimited.

    With expandable segments a request is compared with the limit before it is rounded up to whole pages.
    """
    limit_bytes = limits.process_limit_bytes
    if limit_bytes is not None and limits.config.expandable_segments:
        limit_bytes += limits.config.large_segment_bytes
    return _least(limits.capacity_bytes, limit_bytes)


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def round_up(size_bytes: int, step_bytes: int) -> int:
    """Return the smallest multiple of `step_bytes` that is at least `size_bytes`."""
    return -(-size_bytes // step_bytes) * step_bytes


def _next_division(size_bytes: int, divisions: int) -> int:
    """Round a size up to the next of `divisions` equal steps between two powers of two."""
    floor_bytes = 1 << (size_bytes.bit_length() - 1)
    return round_up(size_bytes, floor_bytes // divisions)


def config_of_torch(version: str) -> AllocatorConfig:
    """Return the default options of a version of torch, such as "2.6.0+cu124".

    A text that is not a version gives the defaults of the newest known torch.
    """
    if torch_version_of(version) >= _OLDEST_SEGMENT_SINCE:
        return AllocatorConfig()
    return AllocatorConfig(reuse_order=ReuseOrder.LOWEST_ADDRESS)


def parse_alloc_conf(text: str, defaults: AllocatorConfig = AllocatorConfig()) -> AllocatorConfig:  # noqa: B008
    """Parse a value of PYTORCH_ALLOC_CONF, such as "max_split_size_mb:128".

    `defaults` are the default options of the version of torch that reads the value (`config_of_torch`). If an
    option is given twice, the last counts, as in torch. Options that do not affect device memory are checked
    and dropped. The parser is stricter than torch, which reads "64MB" as 64 and "-1" as unlimited. Raises
    UsageError for an unknown or malformed option, a value out of range, and a backend that is not simulated.
    """
    options = _split_options("".join(text.split()))
    # Read first, because the limits of other options depend on it.
    large_mib = options.pop("large_segment_size_mb", None)
    large_bytes = DEFAULT_LARGE_SEGMENT_BYTES
    if large_mib is not None:
        large_bytes = _whole("large_segment_size_mb", large_mib, OWN_SEGMENT_BYTES // MIB + 1) * MIB
    config = replace(defaults, large_segment_bytes=large_bytes, max_non_split_rounding_bytes=large_bytes)
    for name, value in options.items():
        config = _apply_option(config, name, value)
    return config


def format_alloc_conf(config: AllocatorConfig) -> str:
    """Return the value of PYTORCH_ALLOC_CONF that gives a configuration.

    Options that have their defaults are left out.

    >>> format_alloc_conf(AllocatorConfig(max_split_bytes=128 * MIB, expandable_segments=True))
    'max_split_size_mb:128,expandable_segments:True'
    """
    options = {"large_segment_size_mb": "large_segment_bytes"}
    options |= {name: field for name, (field, _) in _OPTIONS.items() if field}
    given = parse_alloc_conf("")
    texts = []
    for name, field in options.items():
        value = getattr(config, field)
        if value != getattr(given, field):
            texts.append(f"{name}:{_option_text(field, value)}")
            given = parse_alloc_conf(",".join(texts))  # one option is the default of another
    return ",".join(texts)


def _option_text(field: str, value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ",".join(f"{1 << number}:{divisions}" for number, divisions in enumerate(value)) + "]"
    return str(value // MIB) if field.endswith("_bytes") else str(value)


_OPTION = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")


def _split_options(text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _OPTION.match(text, position)
        if match is None:
            raise _error(f"cannot read {text[position:]!r}; write NAME:VALUE, separated by commas")
        options[match[1]] = match[2]
        position = match.end()
    return options


def _apply_option(config: AllocatorConfig, name: str, value: str) -> AllocatorConfig:
    if name not in _OPTIONS:
        nearest = difflib.get_close_matches(name, [*_OPTIONS, "large_segment_size_mb"], n=1)
        raise _error(f"unknown option {name!r}" + (f"; did you mean {nearest[0]!r}?" if nearest else ""))
    field, read = _OPTIONS[name]
    changes: dict[str, Any] = {field: read(config, name, value)}
    return replace(config, **changes) if field else config


def _backend(config: AllocatorConfig, name: str, value: str) -> None:
    if value == "cudaMallocAsync":
        raise _error("backend:cudaMallocAsync is not simulated, it leaves memory to CUDA; use backend:native")
    if value != "native":
        raise _error(f"unknown backend {value!r}; only native is simulated")


def _error(what: str) -> UsageError:
    return UsageError(f"allocator configuration: {what}")


def _whole(name: str, value: str, least: int) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise _error(f"{name} takes a whole number, not {value!r}")
    if len(value) > _MOST_DIGITS:  # checked first, as Python refuses to convert thousands of digits
        raise _error(f"{name}: more than {_MOST_DIGITS} digits; use a smaller number")
    if int(value) < least:
        raise _error(f"{name} must be at least {least}, not {value}")
    return int(value)


def _size(config: AllocatorConfig, name: str, value: str) -> int:
    return _whole(name, value, config.large_segment_bytes // MIB) * MIB


def _truth(config: AllocatorConfig, name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _error(f"{name} takes True or False, not {value!r}")
    return value == "True"


def _count(config: AllocatorConfig, name: str, value: str) -> int:
    return _whole(name, value, 0)


def _fraction(config: AllocatorConfig, name: str, value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        raise _error(f"{name} takes a number, not {value!r}") from None
    if not 0.0 <= fraction <= 1.0:
        raise _error(f"{name} must be between 0 and 1, not {value}")
    return fraction


def _inner_fraction(config: AllocatorConfig, name: str, value: str) -> float:
    fraction = _fraction(config, name, value)
    if fraction in (0.0, 1.0):
        raise _error(f"{name} must be between 0 and 1, both excluded, not {value}")
    return fraction


def _divisions(config: AllocatorConfig, name: str, value: str) -> tuple[int, ...]:
    """Parse the value of `roundup_power2_divisions` to a number of divisions for each size class.

    The value is a number, such as "4", or a list with sizes in MiB, such as "[256:1,512:2,>:4]". As in torch,
    the first entry also serves all smaller classes, and ">" serves all classes above the class of the
    preceding entry. An entry beyond the last class counts as the last, and classes left out between two
    entries get 0.
    """
    if not value.startswith("["):
        return (_power_of_two(name, value),) * DIVISION_CLASSES
    table = [0] * DIVISION_CLASSES
    last = 0
    first = True
    for entry in value[1:-1].removesuffix(",").split(",") if value != "[]" else ():
        size_mib, colon, steps = entry.partition(":")
        if not colon:
            raise _error(f"{name}: cannot read {entry!r}; write SIZE_MB:DIVISIONS or >:DIVISIONS")
        divisions = 0 if steps == "0" else _power_of_two(name, steps)
        if size_mib == ">":
            table[last + 1 :] = [divisions] * (DIVISION_CLASSES - last - 1)
            continue
        last = min(_power_of_two(name, size_mib).bit_length() - 1, DIVISION_CLASSES - 1)
        table[0 if first else last : last + 1] = [divisions] * (last + 1 if first else 1)
        first = False
    return tuple(table)


def _power_of_two(name: str, value: str) -> int:
    number = _whole(name, value, 1)
    if number & (number - 1):
        raise _error(f"{name} takes powers of two, not {value}")
    return number


_Reader = Callable[[AllocatorConfig, str, str], Any]

_OPTIONS: Final[Mapping[str, tuple[str, _Reader]]] = {  # field ("" if dropped), reader of the value
    "max_split_size_mb": ("max_split_bytes", _size),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _size),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _inner_fraction),
    "expandable_segments": ("expandable_segments", _truth),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom", _truth),
    "backend": ("", _backend),
    # Options for host memory, locks and graph captures, which do not affect one stream without a capture.
    "release_lock_on_cudamalloc": ("", _truth),
    "release_lock_on_hipmalloc": ("", _truth),
    "graph_capture_record_stream_reuse": ("", _truth),
    "pinned_use_cuda_host_register": ("", _truth),
    "pinned_use_hip_host_register": ("", _truth),
    "pinned_use_background_threads": ("", _truth),
    "pinned_free_catch_all": ("", _truth),
    "pinned_num_register_threads": ("", _count),
    "pinned_reserve_segment_size_mb": ("", _count),
    "pinned_max_round_threshold_mb": ("", _count),
    "pinned_max_cached_size_mb": ("", _count),
}
