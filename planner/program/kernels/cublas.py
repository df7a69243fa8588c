"""The size of each thread's cuBLAS workspace.

It depends on `CUBLAS_WORKSPACE_CONFIG`, the GPU and torch's version. ATen/cuda/CublasHandlePool.cpp: the
variable is searched for pairs `:SIZE:COUNT`, SIZE in KiB, and the pairs are added up; without a pair torch
warns and uses the default. Since torch 2.12 cuBLASLt shares this memory (`TORCH_CUBLASLT_UNIFIED_WORKSPACE`,
on by default), so that `CUBLASLT_WORKSPACE_SIZE` has no effect; before, cuBLASLt has a separate workspace of
1 MiB (`lt_workspace`).
"""

import re
from collections.abc import Collection
from enum import Enum, auto

from planner.errors import UsageError
from planner.program.torch_version import NEWEST_TORCH, TorchVersion

KIB = 1024
DEFAULT_BYTES = (2 * 4096 + 8 * 16) * KIB  # :4096:2:16:8
LARGE_BYTES = 8 * 4096 * KIB
# Major compute capabilities with the larger default: Hopper, and Blackwell since the
# spring of 2026 (pytorch#175344).
LARGE_FROM: Collection[int] = frozenset((9, 10, 12))
_LARGE_BEFORE: Collection[int] = frozenset((9,))
_BLACKWELL_SINCE: TorchVersion = (2, 12)
LT_BYTES = 1024 * KIB  # `_parseChosenWorkspaceSize` of CUDABlas.cpp
_LT_KEPT_SINCE: TorchVersion = (2, 9)  # pytorch/pytorch#156495
_LT_SHARED_SINCE: TorchVersion = (2, 12)  # pytorch/pytorch#168175 and #173002
MOST_BYTES = 2**40  # the same limit as for samples: a larger number is a typing error

_PAIRS = re.compile(r"(:[0-9]+:[0-9]+)+")
_PAIR = re.compile(r":([0-9]+):([0-9]+)")
_MOST_DIGITS = 16  # longest number that is multiplied


class LtWorkspace(Enum):
    """The ways in which torch provides cuBLASLt's workspace for matrix multiplications."""

    OF_CALL = auto()  # each call allocates and frees its own workspace
    KEPT = auto()  # each thread keeps a workspace, starting at its first call
    SHARED = auto()  # cuBLAS's workspace is used


def lt_workspace(torch: TorchVersion) -> LtWorkspace:
    """Return how a version of torch provides cuBLASLt's workspace.

    A separate workspace has `LT_BYTES` bytes.

    >>> [lt_workspace(version).name for version in ((2, 8), (2, 9), (2, 12))]
    ['OF_CALL', 'KEPT', 'SHARED']
    """
    if torch >= _LT_SHARED_SINCE:
        return LtWorkspace.SHARED
    return LtWorkspace.KEPT if torch >= _LT_KEPT_SINCE else LtWorkspace.OF_CALL


def workspace_bytes(capability: tuple[int, int], config: str = "", torch: TorchVersion = NEWEST_TORCH) -> int:
    """Return the bytes of the workspace that a cuBLAS handle keeps.

    `config` is the value of CUBLAS_WORKSPACE_CONFIG, "" if it is not set. Raises UsageError if
    `parse_workspace_config` refuses the value.

    >>> workspace_bytes((8, 6)), workspace_bytes((9, 0)), workspace_bytes((9, 0), ":16:8")
    (8519680, 33554432, 131072)
    """
    if config:
        return parse_workspace_config(config)
    large = LARGE_FROM if torch >= _BLACKWELL_SINCE else _LARGE_BEFORE
    return LARGE_BYTES if capability[0] in large else DEFAULT_BYTES


def parse_workspace_config(text: str) -> int:
    """Return the workspace bytes that a value of CUBLAS_WORKSPACE_CONFIG requests.

    `:0:0` requests no bytes. Raises UsageError if the text is anything but pairs `:SIZE:COUNT`, although
    torch would read the pairs that it finds in the text, or if the pairs request more than `MOST_BYTES`.

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
    # The length is checked first because Python refuses to convert thousands of digits.
    are_short = all(len(digits) <= _MOST_DIGITS for pair in pairs for digits in pair)
    total = sum(int(size) * int(count) for size, count in pairs) * KIB if are_short else MOST_BYTES + 1
    if total > MOST_BYTES:
        raise UsageError("--cublas-workspace-config: more than a tebibyte for one workspace; make it smaller")
    return total
