"""Versions of torch for which plans are made, as pairs of numbers: (2, 6).

A rule that differs between versions is in the module of its mechanism and compares the target's version with
the first version to which the rule applies. Emulated runs with each version check the rules
(docs/versions.md).
"""

import re
from typing import Final

from planner.errors import UsageError

TorchVersion = tuple[int, int]

OLDEST_TORCH: Final[TorchVersion] = (2, 4)
NEWEST_TORCH: Final[TorchVersion] = (2, 13)  # the version with which traces are captured

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(\.\d{1,4})?([+.a-z]\w{0,40})?")


def parse_torch_option(text: str) -> str:
    """Return the value of `--torch` as `Job` stores it, such as "2.6".

    It is "" for the newest known version. Raises UsageError for a text that is not a version, and for
    versions older than `OLDEST_TORCH`.

    >>> parse_torch_option("2.6.0+cu124"), parse_torch_option("2.13.0")
    ('2.6', '')
    """
    if not text:
        return ""
    match = _VERSION.fullmatch(text)
    if match is None:
        shown = repr(text if len(text) <= 60 else text[:57] + "...")
        raise UsageError(f"--torch: expected a version such as 2.6, got {shown}")
    version = int(match[1]), int(match[2])
    if version < OLDEST_TORCH:
        known = f"{format_torch_version(OLDEST_TORCH)} to {format_torch_version(NEWEST_TORCH)}"
        raise UsageError(f"--torch {format_torch_version(version)}: rules are known of {known}")
    return "" if version == NEWEST_TORCH else format_torch_version(version)


def torch_version_of(text: str) -> TorchVersion:
    """Return (major, minor) of a version such as "2.6.0+cu124", or the newest known version for other text.

    >>> torch_version_of("2.6.0+cu124"), torch_version_of("")
    ((2, 6), (2, 13))
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    return NEWEST_TORCH if match is None else (int(match[1]), int(match[2]))


def format_torch_version(version: TorchVersion) -> str:
    """Return the version as text, such as "2.6"."""
    return ".".join(map(str, version))
