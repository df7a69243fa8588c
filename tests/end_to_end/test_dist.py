"""The distributions hold every file that the planner reads, and an installed wheel answers alone."""

import csv
import io
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import files
from pathlib import Path
from typing import Any

import pytest

from planner.hardware.calibration.files import TABLES_FOLDER
from planner.hardware.database import DEVICES_FOLDER, OTHER_FOLDER
from planner.planning.process.file import shipped_processes
from planner.program.growth import find_growth
from planner.program.target import Target
from planner.store.codec import load_programs
from planner.store.store import INDEX
from tests.store.test_cache_dir import WITHOUT_TORCH
from tools.bundle_programs import bundled_names

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
PACKAGES = ("planner", "calibration")
MOVED = {"models.yaml": "planner/jobs/files/models.yaml"}  # from the checkout's root into the package
BUNDLED = "planner/store/bundled"  # captured when a distribution is built


def source_files() -> set[str]:
    """Return the files of both packages and the catalogue, as paths within the checkout."""
    inside = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    generated = ("__pycache__", ".lock")
    sources = [path for path in inside if not any(part in generated for part in path.parts)]
    return {path.relative_to(ROOT).as_posix() for path in sources} | set(MOVED)


def run(*command: str | Path, folder: Path) -> str:
    """Return what a command prints that ends without an error."""
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def record(wheel: Path) -> dict[str, str]:
    """Return the digest of every file of a wheel by its path."""
    with zipfile.ZipFile(wheel) as archive:
        (listing,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        rows = csv.reader(io.StringIO(archive.read(listing).decode()))
        return {path: digest for path, digest, _ in rows}


def figures(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without times, and without assumptions, which depend on whether torch is installed."""
    nested = ("at_max", "at_comfortable", "first_failure")
    inner = {key: value and figures(value) for key, value in answer.items() if key in nested}
    return {key: value for key, value in answer.items() if key not in ("seconds", "assumptions")} | inner


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """Return the source distribution and the wheel that `make dist` built from it."""
    folder = Path(request.config.getoption("--distributions"))
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment that holds the wheel, PyYAML, msgspec and what reads the command line."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps")
    run(*pip, built[1], folder=folder)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    libraries = ("PyYAML", "msgspec", "typer", "annotated-doc", "shellingham")
    needed = (file for name in libraries for file in files(name) or ())
    for file in (file for file in needed if file.suffix != ".pyc"):
        target = packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(str(file.locate())).read_bytes())
    return folder


def test_the_wheel_holds_every_file(built: tuple[Path, Path]) -> None:
    """The wheel holds both packages, the catalogue and its programs, and beside its metadata nothing else."""
    inside = {path for path in record(built[1]) if ".dist-info/" not in path}
    captured = {path for path in inside if path.startswith(f"{BUNDLED}/")}
    assert inside - captured == {MOVED.get(path, path) for path in source_files()}
    with zipfile.ZipFile(built[1]) as archive:
        index = json.loads(archive.read(f"{BUNDLED}/{INDEX}"))
        assert sum(archive.getinfo(path).file_size for path in captured) < 3 * 2**20
    files = {name for targets in index["traces"].values() for names in targets.values() for name in names}
    assert captured == {f"{BUNDLED}/{name}" for name in (*files, INDEX)}
    assert len(index["traces"]) == len(bundled_names())


def test_the_source_distribution_holds_every_file(built: tuple[Path, Path]) -> None:
    """The source distribution holds the same files, the licence, and what `make test` needs."""
    with tarfile.open(built[0]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"}
    needed |= {
        "tests/conftest.py",
        "docs/recipes.md",
        "docs/terminal.svg",
        "mkdocs.yml",
        "tools/build_hook.py",
        f"{BUNDLED}/{INDEX}",
    }
    assert (source_files() | needed) - inside == set()


def test_both_ways_to_the_wheel_are_one(
    built: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built from the checkout or from the source distribution, the wheel holds the same bytes."""
    monkeypatch.setenv("PLANNER_CAPTURE_CATALOGUE", "1")  # as make dist does
    build = ("-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT)
    run(sys.executable, *build, folder=tmp_path)
    (direct,) = tmp_path.glob("*.whl")
    assert record(direct) == record(built[1])


def test_metadata_names_the_licence(built: tuple[Path, Path]) -> None:
    """The wheel's metadata has the licence expression, and the wheel the licence's text."""
    with zipfile.ZipFile(built[1]) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{folder}/METADATA").decode().splitlines()
        assert archive.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0" in metadata
    assert "License-File: LICENSE" in metadata


@pytest.mark.parametrize("model", ["cnn", "vgg16_bn", "vit_b_16"])
def test_an_installed_wheel_answers(installed: Path, model: str) -> None:
    """Outside of the repository, without torch, the wheel plans as the checkout does, which traces."""
    for gpu in (("--gpu-mib", "24000"), ("--gpu", "RTX 4090")):  # lines of calibrations need SciPy
        command = ("max-batch", "--model", model, *gpu, "--json")
        there = json.loads(run(installed / "venv/bin/planner", *command, folder=installed))
        here = json.loads(run(sys.executable, "-m", "planner", *command, folder=ROOT))
        assert there["max_batch"] > 0
        assert figures(there) == figures(here)


def test_an_installed_wheel_imports_no_torch(installed: Path) -> None:
    """Llama 70B is refused for a GPU of 24 GB, by the programs in the wheel alone."""
    done = subprocess.run(
        [installed / "venv/bin/python", "-c", WITHOUT_TORCH]
        + ["max-batch", "--model", "llama_70b", "--gpu-mib", "24000"],
        cwd=installed,
        env=os.environ | {"XDG_CACHE_HOME": str(installed / "empty")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")


CAPABILITIES = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


def test_no_job_of_the_catalogue_grows(installed: Path) -> None:
    """The loops of the catalogue hold as much after their third step as after their second."""
    (folder,) = (installed / "venv/lib").glob(f"python*/site-packages/{BUNDLED}")
    for path in sorted(folder.glob("*.trace")):
        traces = [
            encoded.program.specialize(batch, Target(capability, 28))
            for encoded in load_programs(path).programs
            for capability in CAPABILITIES
            if encoded.load_target(capability)
            for batch in (1, 4)  # some programs are of batch 1 alone
        ]
        growths = [find_growth(trace) for trace in traces if trace is not None]
        assert growths and set(growths) == {None}, path.name


def test_an_installed_wheel_finds_its_data(installed: Path) -> None:
    """The installed wheel reads its own GPUs, calibrations, processes, measurements, campaigns and assets."""
    planner = installed / "venv/bin/planner"
    devices = json.loads(run(planner, "devices", "--json", folder=installed))
    assert len(devices["devices"]) == sum(
        len(list(folder.glob("*.yaml"))) for folder in (DEVICES_FOLDER, OTHER_FOLDER)
    )
    tables = json.loads(run(planner, "tables", "--json", folder=installed))
    assert len(tables["calibrations"]) == len(list(TABLES_FOLDER.glob("*.yaml")))
    assert "variable" in shipped_processes()
    assert "Define: allocated = 1024.0 MiB" in run(planner, "replay", "variable", folder=installed)
    look = """
from pathlib import Path
from calibration.campaign_file import STANDARD
from planner.planning.estimators.published import load_measured
import planner.report
from planner.hardware.residuals import RESIDUALS_FILE
assert load_measured() and STANDARD.is_file() and RESIDUALS_FILE.is_file()
assets = Path(planner.report.__file__).with_name("page") / "assets"
print(*sorted(path.name for path in assets.iterdir()))
"""
    shown = run(installed / "venv/bin/python", "-I", "-c", look, folder=installed).split()
    assert shown == sorted(path.name for path in (ROOT / "planner/report/page/assets").iterdir())
