"""cuBLAS's workspace of each thread, as `CUBLAS_WORKSPACE_CONFIG` and the GPU decide it.

ATen/cuda/CublasHandlePool.cpp, as of torch 2.13: the variable is searched for pairs `:SIZE:COUNT`, SIZE in
KiB, which are added up; a text without any gets a warning and the default. cuBLASLt shares this memory
(`TORCH_CUBLASLT_UNIFIED_WORKSPACE`, on by default), so that `CUBLASLT_WORKSPACE_SIZE` moves no byte of it.
"""

import re
from collections.abc import Collection

from planner.errors import UsageError

KIB = 1024
DEFAULT_BYTES = (2 * 4096 + 8 * 16) * KIB  # :4096:2:16:8
LARGE_BYTES = 8 * 4096 * KIB
# Compute capabilities, by their first number, with the larger default: Hopper, and Blackwell since the
# spring of 2026 (pytorch#175344).
LARGE_FROM: Collection[int] = frozenset((9, 10, 12))
MOST_BYTES = 2**40  # as for samples: more is a slip of the keyboard

_PAIRS = re.compile(r"(:[0-9]+:[0-9]+)+")
_PAIR = re.compile(r":([0-9]+):([0-9]+)")
_MOST_DIGITS = 16  # of a number that is worth multiplying


def workspace_bytes(capability: tuple[int, int], config: str = "") -> int:
    """Return what a handle takes for good on a GPU of this compute capability, in bytes.

    `config` is the text of CUBLAS_WORKSPACE_CONFIG, "" where it is not set. Raises UsageError for one that
    torch would not understand.

    >>> workspace_bytes((8, 6)), workspace_bytes((9, 0)), workspace_bytes((9, 0), ":16:8")
    (8519680, 33554432, 131072)
    """
    if config:
        return parse_workspace_config(config)
    return LARGE_BYTES if capability[0] in LARGE_FROM else DEFAULT_BYTES


def parse_workspace_config(text: str) -> int:
    """Return the bytes that a text of CUBLAS_WORKSPACE_CONFIG stands for; `:0:0` stands for none.

    Raises UsageError where anything but pairs is in it, of which torch would read as much as it understands.

    >>> parse_workspace_config(":4096:2:16:8")
    8519680
    """
    pairs = _PAIR.findall(text) if _PAIRS.fullmatch(text) else []
    if not pairs:
        shown = repr(text if len(text) <= 60 else text[:57] + "...")
        raise UsageError(
            f"--cublas-workspace-config: cannot read {shown}; write :SIZE:COUNT with sizes in KiB, such as "
            ":4096:8 or :4096:2:16:8"
        )
    # The length is looked at first because Python refuses to convert thousands of digits.
    are_short = all(len(digits) <= _MOST_DIGITS for pair in pairs for digits in pair)
    total = sum(int(size) * int(count) for size, count in pairs) * KIB if are_short else MOST_BYTES + 1
    if total > MOST_BYTES:
        raise UsageError("--cublas-workspace-config: more than a tebibyte for one workspace; make it smaller")
    return total
