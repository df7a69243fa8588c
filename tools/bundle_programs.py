"""Make the traces that ship with the planner: `planner/store/bundled`, one file for each loop of a
catalogue's job.

    python tools/bundle_programs.py        (or: make traces)

Needs the libraries of all catalogue's models, takes a few minutes, and has to run whenever the tracer or the
catalogue has changed; tests/store/test_bundled_store.py tells. Prints one line for each job.
"""

import json
import sys
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from time import perf_counter

from planner._support.versions import installed_version, public_version
from planner.capture.symbolic.validate import open_keeper
from planner.hardware.database import load_devices
from planner.hardware.device import GENERIC_CAPABILITY
from planner.jobs import Job, resolve_job, split_model
from planner.jobs.catalogue import load_catalogue
from planner.jobs.codec import job_to_json
from planner.planning.source import complete_from_library
from planner.program.stored_loop import Capability, StoredLoop
from planner.program.target import Target
from planner.store.bundled_store import INDEX, SHIPPED, save_shipped, shipped_name
from planner.store.fingerprint import LIBRARIES, tracer_digest

OLDEST = (7, 0)  # who still has an older card traces for it
COMMON = ("torch", "torchvision")  # that every trace depends on


def capabilities() -> list[Capability]:
    """Those of the cards that the planner knows, Volta and newer.

    The generic one comes first, with whose runs the others are compared.
    """
    known = {device.capability for device in load_devices()} - {GENERIC_CAPABILITY}
    return [GENERIC_CAPABILITY, *sorted(capability for capability in known if capability >= OLDEST)]


def loops_of(job: Job, chips: list[Target]) -> list[dict[Capability, StoredLoop]]:
    """The job's loops; those that differ in their kernels' scratch memory only lie together."""
    keeper = open_keeper(job, lambda line: None)
    found: list[dict[Capability, StoredLoop]] = []
    for chip in chips:
        for loop in keeper.loops(chip):
            like = (group for group in found if is_like(next(iter(group.values())), loop))
            group = next(like, None)
            if group is None:
                found.append({chip.capability: loop})
            else:
                group[chip.capability] = loop
    return found


def is_like(one: StoredLoop, other: StoredLoop) -> bool:
    """Whether two loops fit in one file."""
    return (one.own, one.kernels, one.first) == (other.own, other.kernels, other.first)


def versions_of(job: Job) -> dict[str, str | None]:
    """The libraries that the job's traces depend on."""
    names = (*COMMON, *LIBRARIES[split_model(job.source or job.model).source])
    return {name: public_version(installed_version(name)) for name in names}


def main() -> int:
    """Make the folder anew; what was there stays until all is done."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_all(folder)
        SHIPPED.mkdir(exist_ok=True)
        for old in (*SHIPPED.glob(INDEX), *SHIPPED.glob("*.trace")):
            old.unlink()
        for path in (*folder.glob("*.trace"), *folder.glob(INDEX)):  # the index last, which names the others
            copyfile(path, SHIPPED / path.name)
    total = sum(path.stat().st_size for path in SHIPPED.iterdir())
    print(f"{total / 2**20:.2f} MiB in all")
    return 0


def make_all(folder: Path) -> None:
    """Write the traces of all jobs, and the index."""
    chips = [Target.for_capability(capability) for capability in capabilities()]
    catalogue = load_catalogue()
    index: dict[str, object] = {"planner": tracer_digest()}
    traces: dict[str, dict[str, list[str]]] = {}
    completed: dict[str, object] = {}
    versions: dict[str, dict[str, str | None]] = {}
    for name in catalogue:
        start = perf_counter()
        asked = resolve_job(name, catalogue)
        job = complete_from_library(asked)
        completed[shipped_name(asked)] = job_to_json(job)
        versions[shipped_name(job)] = versions_of(job)
        files: dict[str, list[str]] = {}
        size_bytes = 0
        for number, loops in enumerate(loops_of(job, chips)):
            path = folder / f"{name}-{number}.trace"
            save_shipped(loops, path, installed_version("torch") or "")
            size_bytes += path.stat().st_size
            for capability in loops:
                files.setdefault(".".join(map(str, capability)), []).append(path.name)
        traces[shipped_name(job)] = files
        print(f"{name:20s} {len(files)} capabilities {size_bytes:7d} bytes {perf_counter() - start:6.1f} s")
    index |= {"traces": traces, "completed": completed, "versions": versions}
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
