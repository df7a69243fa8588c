"""`planner cache`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from planner.cli.folders import cache_folder
from planner.cli.options import OutputOptions, takes, warn
from planner.cli.output import answer
from planner.cli.words import Argument
from planner.errors import UsageError
from planner.store import Usage, open_cache

CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What to do with the kept traces."""

    what: Annotated[
        list[str] | None, Argument(metavar="[clear]", help="clear: delete all cached traces.")
    ] = None


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What a folder keeps, or kept until now."""

    folder: Path
    usage: Usage
    limit_bytes: int
    is_cleared: bool

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `planner cache`."""
        return {
            "schema": 1,
            "folder": str(self.folder),
            "entries": self.usage.entries,
            "size_mib": self.usage.size_bytes / 2**20,
            "limit_mib": self.limit_bytes / 2**20,
            "cleared": self.is_cleared,
        }

    def __str__(self) -> str:
        entries, limit_mib = self.usage.entries, self.limit_bytes / 2**20
        size_kib = -(-self.usage.size_bytes // 2**10)
        size = f"{size_kib} KiB" if size_kib < 2**10 else f"{size_kib / 2**10:.1f} MiB"
        held = f"{entries} kept {'trace' if entries == 1 else 'traces'}, {size}"
        end = "deleted" if self.is_cleared else f"of at most {limit_mib:.0f} MiB"
        return f"{self.folder}: {held} {end}"


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
    answer(CacheReport(folder, usage, cache.limit_bytes, bool(words)), output)
    return 0
