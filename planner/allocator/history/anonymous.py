"""Remove folders, phase marks and unknown allocator options from a history."""

import re

from msgspec.structs import replace

from planner.allocator.config import parse_alloc_conf
from planner.allocator.history.check import check_history
from planner.allocator.history.history import History
from planner.errors import UsageError
from planner.program import Site

OLDER, NEWER = "2.11", "2.12"  # the versions before and after the change of the order among equal free blocks
_UNKNOWN = "unknown"


def anonymous_history(history: History, gpu: str | None, torch: str | None) -> History:
    """Return a copy of a history without folders, phase marks and options that cannot be parsed.

    `gpu` and `torch` are the GPU and the version of torch, which a snapshot does not name. If `gpu` is None,
    the GPU is "unknown". If `torch` is None, the version is inferred from the order in which equal free
    blocks were reused, if the history shows it.
    """
    sites = tuple(Site(_file(site.module), site.op) for site in history.sites)
    return replace(
        history,
        gpu=gpu or _UNKNOWN,
        torch=torch or _version_by_order(history),
        alloc_conf=_known_options(history.alloc_conf),
        sites=sites,
        marks=(),
    )


def _file(place: str) -> str:
    return re.split(r"[\\/]", place)[-1]


def _known_options(text: str) -> str:
    """Return the text of the allocator's options, or "" if the text cannot be parsed."""
    try:
        parse_alloc_conf(text)
    except UsageError:
        return ""
    return text


def _version_by_order(history: History) -> str:
    known = replace(history, alloc_conf=_known_options(history.alloc_conf))
    agrees = [check_history(replace(known, torch=one)).difference is None for one in (OLDER, NEWER)]
    if agrees == [True, False]:
        return f"{OLDER} or earlier, by the order of equal blocks"
    if agrees == [False, True]:
        return f"{NEWER} or later, by the order of equal blocks"
    return _UNKNOWN
