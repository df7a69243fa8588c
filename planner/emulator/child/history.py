"""Write the allocator's history of a process to a file.

The history has the blocks allocated and freed, with lines of the script. The file is JSON with one object for
each GPU of the process; `planner/emulator/history.py` reads it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .frames import is_own
from .script_logger import ScriptLogger

MAX_EVENTS = 4_000_000  # torch's history keeps at most this many events, the latest
_ACTIONS = ("alloc", "free_requested", "free_completed", "oom")


class History:
    """A writer of the allocator's history of this process, with the ends of optimizer steps."""

    def __init__(
        self, torch: Any, path: Path, process: dict[str, int], script_log: ScriptLogger | None
    ) -> None:
        self._torch, self._path, self._process, self._script_log = torch, path, process, script_log
        self._step_ends: dict[int, list[tuple[int, int, int]]] = {}  # by device

    def mark(self, device: int, step: int, stats: dict[str, Any]) -> None:
        """Record that an optimizer step ends now on a GPU.

        The position of the step's end is the numbers of blocks that torch's statistics count as allocated and
        as freed.
        """
        counts = stats["allocation"]["all"]
        place = (int(counts["allocated"]), int(counts["freed"]), step)
        self._step_ends.setdefault(device, []).append(place)

    def write(self, devices: list[int]) -> None:
        """Write the history of the GPUs `devices` to the file.

        If the file cannot be written, an error is printed. A process that runs out of memory has a file too.
        """
        snapshot = self._torch.cuda.memory._snapshot()
        rows = [self._device(number, snapshot) for number in devices]
        try:
            self._path.write_text(json.dumps(rows, separators=(",", ":")), encoding="utf-8")
        except OSError as error:
            print(f"planner: {self._path}: the history cannot be written: {error.strerror}", file=sys.stderr)

    def _device(self, device: int, snapshot: dict[str, Any]) -> dict[str, Any]:
        torch = self._torch
        sites: dict[tuple[str, str], int] = {}
        streams = {0: 0}
        own: dict[str, bool] = {}
        events = []
        entries = snapshot["device_traces"][device]
        for entry in entries:
            if entry["action"] in _ACTIONS:
                site = -1
                if entry["action"] in ("alloc", "oom"):
                    site = sites.setdefault(_site(entry.get("frames") or [], own), len(sites))
                stream = streams.setdefault(entry.get("stream", 0), len(streams))
                events.append((entry["action"], entry.get("addr", 0), entry["size"], site, stream))
        settings = snapshot.get("allocator_settings", {})
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        return {
            **self._process,
            "device": device,
            "alloc_conf": settings.get("PYTORCH_ALLOC_CONF") or settings.get("PYTORCH_CUDA_ALLOC_CONF") or "",
            "fraction": 1.0 if fraction is None else fraction(device),
            "is_whole": len(entries) < MAX_EVENTS,
            "events": events,
            "sites": [{"module": line, "op": function} for line, function in sites],
            "step_ends": self._step_ends.get(device, []),
            "script_log": None if self._script_log is None else self._script_log.rows(device),
        }


def _site(frames: list[dict[str, Any]], own: dict[str, bool]) -> tuple[str, str]:
    """Return the innermost line of the script (FILE:LINE) and function's name, each "" if there is none.

    `own` caches for each file whether it belongs to the script.
    """
    for frame in frames:
        name = frame["filename"]
        if name not in own:
            own[name] = is_own(name)
        if own[name]:
            return f"{name}:{frame['line']}", str(frames[0]["name"])
    return "", str(frames[0]["name"]) if frames else ""
