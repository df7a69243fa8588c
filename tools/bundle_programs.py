"""Capture the programs of the catalogue's jobs, which the wheel carries, one file for each program.

    python tools/bundle_programs.py FOLDER

tools/build_hook.py runs it when a distribution is built. Needs the libraries of the catalogue's models and
takes about a minute. Keeps a folder whose programs are those of the present sources and libraries. Prints one
line for each job.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from shutil import copyfile, rmtree
from tempfile import TemporaryDirectory
from time import perf_counter

from planner._support.versions import installed_version, public_version
from planner.capture.symbolic.builder import open_builder
from planner.hardware.database import load_devices
from planner.hardware.device import GENERIC_CAPABILITY
from planner.jobs import Job, resolve_job, split_model
from planner.jobs.codec import job_to_json
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.programs import complete_from_library
from planner.program import ignore_progress
from planner.program.program import Program
from planner.program.target import Capability, Target
from planner.store.codec import save_programs
from planner.store.fingerprint import LIBRARIES, source_digest
from planner.store.saving import group_by_structure
from planner.store.store import INDEX, bundled_name

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
    names = (*COMMON, *LIBRARIES[split_model(job.model.source or job.model.name).source])
    return {name: public_version(installed_version(name)) for name in names}


def main() -> int:
    """Fill the folder that the command line names, unless its programs are current."""
    folder = Path(sys.argv[1])
    if is_current(folder):
        return 0
    with TemporaryDirectory() as name:
        made = Path(name)
        make_all(made, bundled_names())
        if folder.exists():
            rmtree(folder)
        folder.mkdir(parents=True)
        for path in (*made.glob("*.trace"), made / INDEX):  # the index last, which names the others
            copyfile(path, folder / path.name)
    total = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{total / 2**20:.2f} MiB in all")
    return 0


def is_current(folder: Path) -> bool:
    """Return whether a capture of the present catalogue would write the same index."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    catalogue = load_catalogue()
    names = {bundled_name(resolve_job(name, catalogue)) for name in bundled_names()}
    return (
        index["planner"] == source_digest()
        and set(index["completed"]) == names
        and all(
            public_version(installed_version(name)) == version
            for known in index["versions"].values()
            for name, version in known.items()
        )
    )


def bundled_names() -> list[str]:
    """Return the catalogue's jobs whose programs are bundled."""
    return [name for name, entry in load_catalogue().items() if is_bundled(name, entry.job.model.source)]


def make_all(folder: Path, names: Iterable[str]) -> None:
    """Write the programs of the named jobs, and the index."""
    targets = [Target.for_capability(capability) for capability in capabilities()]
    catalogue = load_catalogue()
    index: dict[str, object] = {"planner": source_digest()}
    traces: dict[str, dict[str, list[str]]] = {}
    completed: dict[str, object] = {}
    versions: dict[str, dict[str, str | None]] = {}
    for name in names:
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
