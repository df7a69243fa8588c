"""Stores of programs: the user's cache and the bundled programs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol, TypeVar

from planner._support.versions import installed_version, public_version
from planner.errors import DataFileError, UsageError
from planner.jobs import Job, copy_options, is_code, job_from_json, job_to_json
from planner.program import Program, Target
from planner.store.cache_dir import CacheDirectory
from planner.store.codec import ProgramFile, load_programs
from planner.store.fingerprint import Fingerprint, fingerprint_of, source_digest, trace_relevant_fields

T = TypeVar("T")
BUNDLED = Path(__file__).with_name("bundled")
INDEX = "index.json"
BROKEN = (UsageError, LookupError, TypeError, ValueError, AttributeError)


class ProgramStore(Protocol):
    """A store of jobs' programs, and of jobs whose missing parts a model's library filled in, such as inputs.

    A completed job can be read without importing the library.
    """

    def get(self, job: Job, target: Target, batch: int | None = None) -> Sequence[Program]:
        """Return a job's stored programs for the target, or with `batch` the program of its run at `batch`.

        Returns () if nothing is stored.
        """

    def put(self, job: Job, target: Target, program: Program) -> None:
        """Store a program, with its variants for the target's compute capability only.

        Does nothing if the store is read-only.
        """

    def get_job(self, job: Job) -> Job | None:
        """Return the stored form of a job that its model's library completed, or None if it is not stored."""

    def put_job(self, job: Job, completed: Job) -> None:
        """Store the completed form of a job under the original job.

        Does nothing if the store is read-only.
        """


def complete_cached(job: Job, stores: Sequence[ProgramStore], complete: Callable[[Job], Job]) -> Job:
    """Return a job completed by its model's library, from a store if possible, else from `complete`.

    A job that `complete` returns is stored. A stored job gets the options of `job` that do not change the
    trace.
    """
    cached = next((cached for cached in (store.get_job(job) for store in stores) if cached is not None), None)
    if cached is not None:  # jobs that differ only in options irrelevant to the trace share a file
        return copy_options(job, cached, where=lambda option: not option.changes_trace)
    completed = complete(job)
    for store in stores:
        store.put_job(job, completed)
    return completed


@dataclass(slots=True)
class UserCache:
    """The user's cache of traces as a `ProgramStore`.

    A job without a fingerprint is neither found nor stored. `settings` are the process's settings that differ
    from the defaults, as they change traces.
    """

    directory: CacheDirectory
    settings: Mapping[str, str] = field(default_factory=dict)
    _fingerprints: dict[Job, Fingerprint | None] = field(default_factory=dict)

    def get(self, job: Job, target: Target, batch: int | None = None) -> Sequence[Program]:
        """Return a job's cached programs, or with `batch` the program of its run at `batch`.

        Returns () if none is cached.
        """
        return self._get(job, _entry(target, batch), "trace", lambda file: load_targets(file, target)) or ()

    def put(self, job: Job, target: Target, program: Program) -> None:
        """Store a program without its rules and without its variants for other compute capabilities."""
        variants = program.targets[target.capability]
        key = self._key(job, _entry(target, variants.min_batch if program.is_constant(target) else None))
        if key is not None:
            one = replace(program, targets={target.capability: variants}, rules=None)
            self.directory.put(key, [one], {"torch": program.torch})

    def get_job(self, job: Job) -> Job | None:
        """Return the cached form of a job that its model's library completed, or None if none is valid."""
        return self._get(job, {"holds": "job"}, "job", partial(_completed_of, job))

    def put_job(self, job: Job, completed: Job) -> None:
        """Store the completed form of a job under the original job."""
        key = self._key(job, {"holds": "job"})
        if key is not None:
            self.directory.put(key, [], {"completed": job_to_json(completed)})

    def _get(
        self, job: Job, entry: dict[str, Any], what: str, decode: Callable[[ProgramFile], T]
    ) -> T | None:
        key = self._key(job, entry)
        file = None if key is None else self.directory.get(key)
        if key is None or file is None:
            return None
        try:
            return decode(file)
        except BROKEN as error:
            self.directory.warn_of(f"{self.directory.folder}: a cached {what} is broken: {error}")
            return None

    def _key(self, job: Job, entry: dict[str, Any]) -> Fingerprint | None:
        if job not in self._fingerprints:
            self._fingerprints[job] = fingerprint_of(job)
        key = self._fingerprints[job]
        settings = {"settings": dict(self.settings)} if self.settings else {}
        return None if key is None else key | entry | settings


def _completed_of(job: Job, file: ProgramFile) -> Job:
    """Return the completed job in a file, or raise ValueError if it names other code than `job`.

    Also raises the errors of `job_from_json`, and KeyError if the file has no completed job.
    """
    completed = job_from_json(file.about["completed"])
    for name in ("model", "source", "optimizer", "deepspeed"):
        if completed.value(name) != job.value(name):
            raise ValueError(f"it has another {name}")
    if is_code(completed.loop.loss) and completed.loop.loss != job.loop.loss:
        raise ValueError("it has another loss")
    return completed


def _entry(target: Target, batch: int | None) -> dict[str, Any]:
    """Return the part of a cache key that identifies the program, or with `batch` the run at `batch`."""
    if batch is None:
        return {"holds": "program", "capability": list(target.capability)}
    numbers = {"capability": list(target.capability), "batch": batch, "sm_count": target.sm_count}
    query = target.conv_workspace_query  # such a run includes its answers, as its kernels cannot be separated
    return {"holds": "run", **numbers, "convolutions": "" if query is None else query.name}


def load_targets(file: ProgramFile, target: Target) -> list[Program]:
    """Return a file's programs for the target's compute capability.

    Raises LookupError, TypeError or ValueError.
    """
    torch = file.about["torch"]
    if not isinstance(torch, str):
        raise TypeError("no version of torch")
    programs = [encoded.program for encoded in file.programs if encoded.load_target(target.capability)]
    for program in programs:
        program.torch = torch
    return programs


@dataclass
class BundledStore:
    """The bundled programs of the catalogue's jobs, a read-only `ProgramStore`.

    A program is used if its libraries are installed in the bundled versions, or are not installed.
    """

    folder: Path = BUNDLED
    _files: dict[str, ProgramFile] = field(default_factory=dict)

    def get(self, job: Job, target: Target, batch: int | None = None) -> Sequence[Program]:
        """Return the bundled programs of a job, or () if `batch` is not None.

        They are the programs and the runs for the target's compute capability.
        """
        name = bundled_name(job)
        if batch is not None or not self._is_current(name):
            return ()
        programs: list[Program] = []
        for file in self._index["traces"][name].get(".".join(map(str, target.capability)), ()):
            try:
                if file not in self._files:
                    self._files[file] = load_programs(self.folder / file)
                programs += load_targets(self._files[file], target)
            except (DataFileError, *BROKEN):  # a damaged installation
                continue
        return programs

    def put(self, job: Job, target: Target, program: Program) -> None:
        """Do nothing: the store cannot be written."""

    def get_job(self, job: Job) -> Job | None:
        """Return the completed form of a job, or None if it is not bundled.

        Returns None too if the completed job's libraries are installed in other versions than the bundled.
        """
        values = self._index.get("completed", {}).get(bundled_name(job))
        completed = None if values is None else job_from_json(values)
        return completed if completed is not None and self._is_current(bundled_name(completed)) else None

    def put_job(self, job: Job, completed: Job) -> None:
        """Do nothing: the store cannot be written."""

    @cached_property
    def _index(self) -> dict[str, Any]:
        try:
            index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # nothing was bundled
            return {}
        is_ours = isinstance(index, dict) and index.get("planner") == source_digest()
        return index if is_ours else {}

    def _is_current(self, name: str) -> bool:
        """Return whether a job is bundled, and each of its libraries is absent or has the bundled version."""
        versions = self._index.get("versions", {}).get(name)
        if versions is None:
            return False
        installed = {name: public_version(installed_version(name)) for name in versions}
        return all(installed[name] in (None, version) for name, version in versions.items())


def bundled_name(job: Job) -> str:
    """Return the job's name in the index of bundled programs, a hash of the options that affect the trace."""
    text = json.dumps(job_to_json(trace_relevant_fields(job)), sort_keys=True)
    return sha256(text.encode()).hexdigest()[:16]
