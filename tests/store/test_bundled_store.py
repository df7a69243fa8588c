"""The traces that ship: what the installed tracer makes, found at once, used only where it holds."""

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
from planner.jobs import is_completed_by_library, resolve_job
from planner.jobs.catalogue import load_catalogue
from planner.program.target import Target
from planner.store.bundled_store import INDEX, SHIPPED, ShippedShelf, shipped_name
from planner.store.fingerprint import tracer_digest
from tests.store.test_cache_dir import WITHOUT_TORCH, told

STALE = "the shipped traces are not those of this tracer: run `make traces`"
GENERIC = Target.for_capability((8, 6))


def shipped_index() -> dict[str, Any]:
    index: dict[str, Any] = json.loads((SHIPPED / INDEX).read_text())
    return index


def versions_differ() -> bool:
    versions = [versions for known in shipped_index()["versions"].values() for versions in known.items()]
    return any(public_version(installed_version(name)) != version for name, version in versions)


def why_unused() -> str:
    """Why the planner leaves the shipped traces alone here; that they are old is told by the first test."""
    if shipped_index()["planner"] != tracer_digest():
        return STALE
    return "shipped traces are those of other versions of torch or the models' libraries" * versions_differ()


other_versions = pytest.mark.skipif(bool(why_unused()), reason=why_unused())


def test_shipped_traces_are_of_this_tracer() -> None:
    """Whoever changes the tracer or the catalogue has to make them anew."""
    assert shipped_index()["planner"] == tracer_digest(), STALE
    shelf, catalogue = ShippedShelf(), load_catalogue()
    for name in catalogue:
        job = resolve_job(name, catalogue)
        if is_completed_by_library(job):
            job = shelf.completed(job) or pytest.fail(f"{name}: {STALE}")
        assert shipped_name(job) in shipped_index()["traces"], f"{name}: {STALE}"


def test_they_are_small() -> None:
    """All together take less than 3 MiB."""
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 3 * 2**20


@other_versions
@pytest.mark.parametrize("name", ["cnn", "vgg16_bn", "vit_b_16"])
def test_shipped_answers_are_the_tracers(name: str, tmp_path: Path) -> None:
    """From an empty cache the same as traced anew, and nothing is kept twice."""
    for card in ({"gpu_mib": 24000}, {"gpu": "H100"}):
        assert told(max_batch(name, **card, cache=tmp_path)) == told(max_batch(name, **card))
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


def found(shelf: ShippedShelf, chip: Target = GENERIC) -> int:
    catalogue = load_catalogue()
    return len(list(shelf.loops(resolve_job("resnet50", catalogue), chip)))


def test_other_versions_use_none(tmp_path: Path) -> None:
    """Of another tracer, torch or library, or of none at all; another card's are not there."""
    copytree(SHIPPED, tmp_path / "shipped")
    index = shipped_index() | {"planner": tracer_digest()}
    path = tmp_path / "shipped" / INDEX

    def with_index(changed: dict[str, Any]) -> ShippedShelf:
        path.write_text(json.dumps(changed))
        return ShippedShelf(path.parent)

    here = {
        job: {name: public_version(installed_version(name)) for name in versions}
        for job, versions in index["versions"].items()
    }
    same = index | {"versions": here}
    assert found(with_index(same)) == 1
    assert found(with_index(same), Target((5, 0), 10)) == 0
    assert found(with_index(same | {"planner": "another"})) == 0
    assert found(with_index(same | {"versions": {job: {"torch": "1.0"} for job in here}})) == 0
    assert found(with_index(same | {"versions": {job: {"not-installed": "1.0"} for job in here}})) == 1
    path.write_text("{")
    assert found(ShippedShelf(path.parent)) == 0
    assert found(ShippedShelf(tmp_path / "nowhere")) == 0
