"""The programs that a wheel carries: used only where the installed libraries would capture the same ones."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from planner._support.versions import installed_version, public_version
from planner.jobs import resolve_job
from planner.jobs.files.catalogue import load_catalogue
from planner.program.target import Target
from planner.store.store import INDEX, BundledStore
from tools.bundle_programs import is_current, make_all

GENERIC = Target.for_capability((8, 6))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the programs of two jobs, the second of which transformers completes."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bundle")
    make_all(folder, ["cnn", "bert_base"])
    return folder


def count(store: BundledStore, chip: Target = GENERIC) -> int:
    """Return the number of programs of the CNN that a store has for a GPU."""
    return len(store.get(resolve_job("cnn", load_catalogue()), chip))


def knows_inputs(store: BundledStore) -> bool:
    """Return whether the store has the inputs of a job that transformers would complete."""
    return store.get_job(resolve_job("bert_base", load_catalogue())) is not None


@pytest.mark.slow
def test_other_versions_use_none(bundle: Path, tmp_path: Path) -> None:
    """Programs of another tracer, torch or library, or of none, are not used; another GPU's are missing."""
    copytree(bundle, tmp_path / "shipped")
    path = tmp_path / "shipped" / INDEX
    index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))

    def with_index(changed: dict[str, Any]) -> BundledStore:
        path.write_text(json.dumps(changed))
        return BundledStore(path.parent)

    def with_versions(versions: dict[str, str]) -> BundledStore:
        return with_index(index | {"versions": dict.fromkeys(index["versions"], versions)})

    for known in index["versions"].values():
        assert known == {name: public_version(installed_version(name)) for name in known}
    assert count(with_index(index)) == 1
    assert knows_inputs(with_index(index))
    assert count(with_index(index), Target((5, 0), 10)) == 0
    assert count(with_index(index | {"planner": "another"})) == 0
    assert count(with_versions({"torch": "1.0"})) == 0
    assert not knows_inputs(with_versions({"torch": "1.0"}))
    assert count(with_versions({"not-installed": "1.0"})) == 1
    path.write_text("{")
    assert count(BundledStore(path.parent)) == 0
    assert count(BundledStore(tmp_path / "nowhere")) == 0


def test_a_folder_of_some_jobs_is_made_anew(bundle: Path, tmp_path: Path) -> None:
    """A build keeps the programs of an earlier one only where those of all jobs are there."""
    assert not is_current(bundle)
    assert not is_current(tmp_path)
