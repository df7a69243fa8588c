"""The command `planner cache`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument

from planner.cli.options import Answer, with_options
from planner.cli.output import warn
from planner.cli.paths import cache_folder
from planner.errors import UsageError
from planner.hardware.cudnn import open_answer_cache
from planner.report import Report, Result, report_of
from planner.store import CacheStats, open_cache

CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class CacheResult(Result):
    """The numbers, sizes and limits of cached traces and cuDNN answers.

    If `is_cleared`, the data were just deleted.
    """

    folder: Path
    usage: CacheStats
    limit_bytes: int
    answers: CacheStats
    answers_limit_bytes: int
    is_cleared: bool

    def _report(self) -> Report:
        from planner.report import cache_document, cache_to_json

        return report_of(
            cache_document,
            cache_to_json,
            self.folder,
            self.usage,
            self.limit_bytes,
            self.answers,
            self.answers_limit_bytes,
            self.is_cleared,
        )


@with_options()
def cache_command(
    action: Annotated[list[str] | None, Argument(metavar="[clear]", help="clear: delete what is cached.")],
) -> Answer:
    """Show the number and size of cached traces and answers of cuDNN, or delete them."""
    if action not in (None, [CLEAR]):
        raise UsageError(f"cache {' '.join(action)}: only clear can be done; see planner cache --help")
    folder = cache_folder()
    if folder is None:
        raise UsageError("no home folder is known to cache traces in: set XDG_CACHE_HOME")
    cache = open_cache(folder, warn)
    usage = cache.clear() if action else cache.stats()
    answers, stored, answers_limit_bytes = open_answer_cache(folder), (0, 0), 0
    if answers is not None:
        stored, answers_limit_bytes = answers.clear() if action else answers.stats(), answers.limit_bytes
    numbers = CacheStats(*stored)
    return CacheResult(folder, usage, cache.limit_bytes, numbers, answers_limit_bytes, bool(action)), True
