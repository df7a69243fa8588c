"""`planner cache`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from planner.cli.folders import cache_folder
from planner.cli.options import OutputOptions, takes, warn
from planner.cli.output import answer
from planner.cli.words import Argument
from planner.errors import UsageError
from planner.report import Result
from planner.store import Usage, open_cache

CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What to do with the kept traces."""

    what: Annotated[
        list[str] | None, Argument(metavar="[clear]", help="clear: delete all cached traces.")
    ] = None


@dataclass(frozen=True, slots=True)
class CacheResult(Result):
    """The traces in a folder, or those that were deleted."""

    folder: Path
    usage: Usage
    limit_bytes: int
    is_cleared: bool


@takes(CacheOptions, OutputOptions)
def cache_command(asked: CacheOptions, output: OutputOptions) -> int:
    """Show the number and size of cached traces, or delete them."""
    words = list(asked.what or ())
    if words not in ([], [CLEAR]):
        raise UsageError(f"cache {' '.join(words)}: only clear can be done; see planner cache --help")
    folder = cache_folder()
    if folder is None:
        raise UsageError("no home folder is known to keep traces in: set XDG_CACHE_HOME")
    cache = open_cache(folder, warn)
    usage = cache.clear() if words else cache.usage()
    answer(CacheResult(folder, usage, cache.limit_bytes, bool(words)), output)
    return 0
