"""Where a job's traces lie before anybody takes them: a place of kept traces, and the user's.

A file holds a loop (`stored_loop`), which answers for a range of batch sizes on all GPUs of one or several
compute capabilities, exactly or not at all. Jobs that only their model's library can complete are kept whole
beside them, so that the library need not be imported to know what is asked for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from planner._support.versions import installed_version
from planner.errors import UsageError
from planner.jobs import Job, job_from_json, job_to_json
from planner.program import StoredLoop, Target, Trace, loop_from_json, loops_to_json
from planner.store.cache_dir import TraceCache
from planner.store.fingerprint import Key, key_of

_NO_TRACE = Trace((), (), (1,))
BROKEN = (UsageError, LookupError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class Found:
    """A loop, and the torch that it was traced with."""

    loop: StoredLoop
    torch: str


class Shelf(Protocol):
    """A place of kept traces."""

    def loops(self, job: Job, chip: Target) -> Iterator[Found]:
        """The job's loops on such a GPU."""

    def run(self, job: Job, chip: Target, batch: int) -> Found | None:
        """The job's run at this batch size."""

    def completed(self, job: Job) -> Job | None:
        """The job as its model's library completes it."""


@dataclass(slots=True)
class UserShelf:
    """The user's cache. A job without a key (`trace_key`) is neither found nor kept."""

    cache: TraceCache
    _keys: dict[Job, Key | None] = field(default_factory=dict)

    def loops(self, job: Job, chip: Target) -> Iterator[Found]:
        """The job's loop, if one is kept."""
        found = self._found(job, chip, _loop_held(chip))
        if found is not None:
            yield found

    def run(self, job: Job, chip: Target, batch: int) -> Found | None:
        """The run at this batch size."""
        return self._found(job, chip, _run_held(chip, batch))

    def _found(self, job: Job, chip: Target, held: dict[str, Any]) -> Found | None:
        key = self._key(job, held)
        found = None if key is None else self.cache.read(key)
        if key is None or found is None:
            return None
        trace, about = found
        try:
            return Found(loop_from_json(trace, about["loop"], chip.capability), torch_of(about))
        except BROKEN as error:
            self.cache.refuse(key, f"{self.cache.folder}: a kept trace is broken: {error}")
            return None

    def completed(self, job: Job) -> Job | None:
        """The job that was kept under its name."""
        key = self._key(job, {"holds": "job"})
        found = None if key is None else self.cache.read(key)
        if key is None or found is None:
            return None
        try:
            return job_from_json(found[1]["completed"])
        except BROKEN as error:
            self.cache.refuse(key, f"{self.cache.folder}: a kept job is broken: {error}")
            return None

    def keep_completed(self, job: Job, completed: Job) -> None:
        """Remember what a library said of a job."""
        key = self._key(job, {"holds": "job"})
        if key is not None:
            self.cache.write(key, _NO_TRACE, {"completed": job_to_json(completed)})

    def keep_loop(self, job: Job, chip: Target, loop: StoredLoop) -> None:
        """Keep a loop, or a run at one batch size."""
        held = _loop_held(chip) if loop.last > loop.first else _run_held(chip, loop.first)
        key = self._key(job, held)
        if key is not None:
            about = {"loop": loops_to_json({chip.capability: loop}), "torch": installed_version("torch")}
            self.cache.write(key, loop.own, about)

    def _key(self, job: Job, held: dict[str, Any]) -> Key | None:
        if job not in self._keys:
            self._keys[job] = key_of(job)
        key = self._keys[job]
        return None if key is None else key | held


def _loop_held(chip: Target) -> dict[str, Any]:
    return {"holds": "loop", "capability": list(chip.capability)}


def _run_held(chip: Target, batch: int) -> dict[str, Any]:
    held = {"holds": "run", "capability": list(chip.capability), "batch": batch}
    return held | {"multiprocessors": chip.sm_count}


def torch_of(about: Mapping[str, Any]) -> str:
    torch = about["torch"]
    if not isinstance(torch, str):
        raise TypeError("no version of torch")
    return torch
