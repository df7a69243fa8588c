"""The traces of the catalogue's jobs that ship with the package; tools/bundle_programs.py makes them.

The index says of which tracer, torch and libraries they are, and which file answers for a job on the GPUs of
a compute capability.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from planner._support.versions import installed_version, public_version
from planner.errors import DataFileError
from planner.jobs import Job, job_from_json, job_to_json
from planner.program import Capability, StoredLoop, Target, loop_from_json, loops_to_json
from planner.store.codec import load_trace, save_trace
from planner.store.fingerprint import traced, tracer_digest
from planner.store.kept_traces import BROKEN, Found, torch_of

SHIPPED = Path(__file__).with_name("bundled")
INDEX = "index.json"


@dataclass
class ShippedShelf:
    """The traces of the catalogue's jobs, read only where the installed versions would trace the same.

    A library that is not installed cannot say anything else, and its jobs are answered all the same.
    """

    folder: Path = SHIPPED

    def run(self, job: Job, chip: Target, batch: int) -> Found | None:
        """Single runs ship among the loops."""
        return None

    def loops(self, job: Job, chip: Target) -> Iterator[Found]:
        """The job's loops for such GPUs, and the run at batch 1 that stands beside some."""
        named = shipped_name(job)
        if not self._would_be_the_same(named):
            return
        files = self._index["traces"][named]
        for name in files.get(".".join(map(str, chip.capability)), ()):
            try:
                own, about = load_trace(self.folder / name)
                found = Found(loop_from_json(own, about["loop"], chip.capability), torch_of(about))
            except (DataFileError, *BROKEN):  # an installation that was tampered with; the tracer is there
                continue
            yield found

    def completed(self, job: Job) -> Job | None:
        """The job that the catalogue's entry becomes."""
        said = self._index.get("completed", {}).get(shipped_name(job))
        return None if said is None else job_from_json(said)

    @cached_property
    def _index(self) -> dict[str, Any]:
        try:
            index = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # none was made
            return {}
        is_ours = isinstance(index, dict) and index.get("planner") == tracer_digest()
        return index if is_ours else {}

    def _would_be_the_same(self, named: str) -> bool:
        """Whether the installed libraries would trace the job as those did that were installed then."""
        versions = self._index.get("versions", {}).get(named)
        if versions is None:
            return False
        installed = {name: public_version(installed_version(name)) for name in versions}
        return all(installed[name] in (None, version) for name, version in versions.items())


def shipped_name(job: Job) -> str:
    """What the index calls a job."""
    return sha256(json.dumps(job_to_json(traced(job)), sort_keys=True).encode()).hexdigest()[:16]


def save_shipped(loops: Mapping[Capability, StoredLoop], path: Path, torch: str) -> None:
    """Write loops that differ in their cases only. Raises DataFileError."""
    own = next(iter(loops.values())).own
    save_trace(own, path, {"loop": loops_to_json(loops), "torch": torch})
