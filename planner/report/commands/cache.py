"""The report of `planner cache`."""

from pathlib import Path
from typing import Any

from planner.report.document import Document, Paragraph
from planner.report.units import SCHEMA
from planner.store import CacheStats


def cache_document(folder: Path, usage: CacheStats, limit_bytes: int, is_cleared: bool) -> Document:
    """Return the contents of a folder, or those until now."""
    entries, limit_mib = usage.entries, limit_bytes / 2**20
    size_kib = -(-usage.size_bytes // 2**10)
    size = f"{size_kib} KiB" if size_kib < 2**10 else f"{size_kib / 2**10:.1f} MiB"
    end = "deleted" if is_cleared else f"of at most {limit_mib:.0f} MiB"
    return Document.of(
        [Paragraph(f"{folder}: {entries} cached {'trace' if entries == 1 else 'traces'}, {size} {end}")]
    )


def cache_to_json(folder: Path, usage: CacheStats, limit_bytes: int, is_cleared: bool) -> dict[str, Any]:
    """Return the JSON object of `planner cache`."""
    return {
        "schema": SCHEMA,
        "folder": str(folder),
        "entries": usage.entries,
        "size_mib": usage.size_bytes / 2**20,
        "limit_mib": limit_bytes / 2**20,
        "cleared": is_cleared,
    }
