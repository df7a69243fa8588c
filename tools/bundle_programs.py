"""Make the bundled programs of the planner: `planner/store/bundled`, one file for each program of a
catalogue's job.

    python tools/bundle_programs.py        (or: make traces)

Needs the libraries of all catalogue's models, takes a few minutes, and has to run whenever the capture or the
catalogue has changed, which tests/store/test_bundled_store.py detects. Prints one line for each job.
"""

import json
import sys
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from time import perf_counter

from planner._support.versions import installed_version, public_version
from planner.capture.symbolic.builder import open_builder
from planner.hardware.database import load_devices
from planner.hardware.device import GENERIC_CAPABILITY
from planner.jobs import Job, resolve_job, split_model
from planner.jobs.catalogue import load_catalogue
from planner.jobs.codec import job_to_json
from planner.planning.programs import complete_from_library
from planner.program import ignore_progress
from planner.program.program import Program
from planner.program.target import Capability, Target
from planner.store.codec import save_programs
from planner.store.fingerprint import LIBRARIES, source_digest
from planner.store.saving import group_by_structure
from planner.store.store import BUNDLED, INDEX, bundled_name

_LARGE_SOURCE = (
    "diffusers:"  # whose programs for all capabilities take minutes to make and megabytes to store
)
_FOR_CLUSTERS = ("llama_405b",)  # that no one GPU holds: two megabytes, and ranks are traced anew
OLDEST = (7, 0)  # older cards are traced on their own machines
COMMON = ("torch", "torchvision")  # that every trace depends on


def capabilities() -> list[Capability]:
    """Return the compute capabilities of the listed GPUs, Volta and newer.

    The generic one comes first, with whose runs the others are compared.
    """
    listed = {device.capability for device in load_devices()} - {GENERIC_CAPABILITY}
    return [GENERIC_CAPABILITY, *sorted(capability for capability in listed if capability >= OLDEST)]


def is_bundled(name: str, source: str) -> bool:
    """Return whether the programs of a catalogue's job are bundled."""
    return name not in _FOR_CLUSTERS and not source.startswith(_LARGE_SOURCE)


def programs_of(job: Job, targets: list[Target]) -> list[Program]:
    """Return the job's programs; those that differ in the workspaces of their kernels alone are one."""
    builder = open_builder(job, ignore_progress)
    programs: list[tuple[Program, Target]] = []
    for target in targets:
        for program in builder.programs(target):
            builder.enumerate_variants(program, target)
            programs.append((program, target))
    return group_by_structure(programs)


def versions_of(job: Job) -> dict[str, str | None]:
    """Return the libraries that the job's programs depend on."""
    names = (*COMMON, *LIBRARIES[split_model(job.source or job.model).source])
    return {name: public_version(installed_version(name)) for name in names}


def main() -> int:
    """Make the folder anew; its earlier files stay until all is done."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_all(folder)
        BUNDLED.mkdir(exist_ok=True)
        for old in (*BUNDLED.glob(INDEX), *BUNDLED.glob("*.trace")):
            old.unlink()
        for path in (*folder.glob("*.trace"), *folder.glob(INDEX)):  # the index last, which names the others
            copyfile(path, BUNDLED / path.name)
    total = sum(path.stat().st_size for path in BUNDLED.iterdir())
    print(f"{total / 2**20:.2f} MiB in all")
    return 0


def make_all(folder: Path) -> None:
    """Write the programs of all jobs, and the index."""
    targets = [Target.for_capability(capability) for capability in capabilities()]
    catalogue = load_catalogue()
    index: dict[str, object] = {"planner": source_digest()}
    traces: dict[str, dict[str, list[str]]] = {}
    completed: dict[str, object] = {}
    versions: dict[str, dict[str, str | None]] = {}
    for name, entry in catalogue.items():
        if not is_bundled(name, entry.job.source):
            continue
        start = perf_counter()
        catalogue_job = resolve_job(name, catalogue)
        job = complete_from_library(catalogue_job)
        completed[bundled_name(catalogue_job)] = job_to_json(job)
        versions[bundled_name(job)] = versions_of(job)
        files: dict[str, list[str]] = {}
        size_bytes = 0
        for number, program in enumerate(programs_of(job, targets)):
            path = folder / f"{name}-{number}.trace"
            save_programs([program], path, {"torch": installed_version("torch") or ""})
            size_bytes += path.stat().st_size
            for capability in program.targets:
                files.setdefault(".".join(map(str, capability)), []).append(path.name)
        traces[bundled_name(job)] = files
        print(f"{name:20s} {len(files)} capabilities {size_bytes:7d} bytes {perf_counter() - start:6.1f} s")
    index |= {"traces": traces, "completed": completed, "versions": versions}
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
