"""The bundled programs: made by the installed tracer, loaded at once, used only where they hold."""

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from planner import max_batch
from planner._support.versions import installed_version, public_version
from planner.jobs import is_completed_by_library, job_from_json, resolve_job
from planner.jobs.catalogue import load_catalogue
from planner.program.target import Target
from planner.store.fingerprint import source_digest
from planner.store.store import BUNDLED, INDEX, BundledStore, bundled_name
from tests.store.test_cache_dir import WITHOUT_TORCH, json_of
from tools.bundle_programs import is_bundled

STALE = "the bundled programs are not those of this tracer: run `make traces`"
GENERIC = Target.for_capability((8, 6))


def bundled_index() -> dict[str, Any]:
    index: dict[str, Any] = json.loads((BUNDLED / INDEX).read_text())
    return index


def versions_differ() -> bool:
    versions = [versions for known in bundled_index()["versions"].values() for versions in known.items()]
    return any(public_version(installed_version(name)) != version for name, version in versions)


def why_unused() -> str:
    """Return why the bundled programs are unused here; that they are old is the first test's to show."""
    if bundled_index()["planner"] != source_digest():
        return STALE
    return (
        "bundled programs are those of other versions of torch or the models' libraries" * versions_differ()
    )


other_versions = pytest.mark.skipif(bool(why_unused()), reason=why_unused())


def test_bundled_traces_are_of_this_tracer() -> None:
    """The bundled programs are of the present tracer and catalogue."""
    assert bundled_index()["planner"] == source_digest(), STALE
    catalogue = load_catalogue()
    for name in catalogue:
        job = resolve_job(name, catalogue)
        if not is_bundled(name, job.source):
            continue
        if is_completed_by_library(job):
            job = job_from_json(bundled_index()["completed"][bundled_name(job)])
        assert bundled_name(job) in bundled_index()["traces"], f"{name}: {STALE}"


def test_they_are_small() -> None:
    """All together take less than 3 MiB."""
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 3 * 2**20


@other_versions
@pytest.mark.parametrize("name", ["cnn", "vgg16_bn", "vit_b_16"])
def test_bundled_answers_are_the_tracers(name: str, tmp_path: Path) -> None:
    """Answers from an empty cache are those of a new trace, and nothing is cached twice."""
    for card in ({"gpu_mib": 24000}, {"gpu": "H100"}):
        assert json_of(max_batch(name, **card, cache=tmp_path)) == json_of(max_batch(name, **card))
    assert list(tmp_path.iterdir()) == []


@other_versions
def test_a_new_installation_answers_without_torch(tmp_path: Path) -> None:
    """The example of the README, with neither a cache nor torch imported; the same for Llama's 70 billion."""
    for model in ("vit_b_16", "llama_70b"):
        command = [sys.executable, "-c", WITHOUT_TORCH, "max-batch", "--model", model, "--gpu-mib", "24000"]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stderr == ""
        assert done.returncode == (1 if model == "llama_70b" else 0)


def count(store: BundledStore, chip: Target = GENERIC) -> int:
    catalogue = load_catalogue()
    return len(store.get(resolve_job("resnet50", catalogue), chip))


def knows_inputs(store: BundledStore) -> bool:
    """Return whether the store has the inputs of a job that transformers would complete."""
    return store.get_job(resolve_job("llama_70b", load_catalogue())) is not None


def test_other_versions_use_none(tmp_path: Path) -> None:
    """Programs of another tracer, torch or library, or of none, are not used; another card's are missing."""
    copytree(BUNDLED, tmp_path / "shipped")
    index = bundled_index() | {"planner": source_digest()}
    path = tmp_path / "shipped" / INDEX

    def with_index(changed: dict[str, Any]) -> BundledStore:
        path.write_text(json.dumps(changed))
        return BundledStore(path.parent)

    here = {
        job: {name: public_version(installed_version(name)) for name in versions}
        for job, versions in index["versions"].items()
    }
    same = index | {"versions": here}
    assert count(with_index(same)) == 1
    assert knows_inputs(with_index(same))
    assert count(with_index(same), Target((5, 0), 10)) == 0
    assert count(with_index(same | {"planner": "another"})) == 0
    others = with_index(same | {"versions": {job: {"torch": "1.0"} for job in here}})
    assert count(others) == 0
    assert not knows_inputs(others)
    assert count(with_index(same | {"versions": {job: {"not-installed": "1.0"} for job in here}})) == 1
    path.write_text("{")
    assert count(BundledStore(path.parent)) == 0
    assert count(BundledStore(tmp_path / "nowhere")) == 0
