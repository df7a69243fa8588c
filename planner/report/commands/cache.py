"""The report of `planner cache`."""

from pathlib import Path
from typing import Any

from planner.report.document import Document, Paragraph
from planner.report.units import SCHEMA
from planner.store import CacheStats


def cache_document(
    folder: Path,
    usage: CacheStats,
    limit_bytes: int,
    answers: CacheStats,
    answers_limit_bytes: int,
    is_cleared: bool,
) -> Document:
    """Return the report of `planner cache`.

    It has the number and size of the traces and of cuDNN's answers, either cached or just deleted.
    """
    traces = f"{usage.entries} cached {'trace' if usage.entries == 1 else 'traces'}"
    queries = f"{answers.entries:,} {'answer' if answers.entries == 1 else 'answers'} of cuDNN"
    words = [
        f"{what}, {_size(stats.size_bytes)} {'deleted' if is_cleared else _of(limit)}"
        for what, stats, limit in ((traces, usage, limit_bytes), (queries, answers, answers_limit_bytes))
    ]
    return Document.of([Paragraph(f"{folder}: {'; '.join(words)}")])


def _size(size_bytes: int) -> str:
    size_kib = -(-size_bytes // 2**10)
    return f"{size_kib} KiB" if size_kib < 2**10 else f"{size_kib / 2**10:.1f} MiB"


def _of(limit_bytes: int) -> str:
    return f"of at most {limit_bytes / 2**20:.0f} MiB"


def cache_to_json(
    folder: Path,
    usage: CacheStats,
    limit_bytes: int,
    answers: CacheStats,
    answers_limit_bytes: int,
    is_cleared: bool,
) -> dict[str, Any]:
    """Return the JSON object of `planner cache`."""
    return {
        "schema": SCHEMA,
        "folder": str(folder),
        "entries": usage.entries,
        "size_mib": usage.size_bytes / 2**20,
        "limit_mib": limit_bytes / 2**20,
        "answers": answers.entries,
        "answers_size_mib": answers.size_bytes / 2**20,
        "answers_limit_mib": answers_limit_bytes / 2**20,
        "cleared": is_cleared,
    }
