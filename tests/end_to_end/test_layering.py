"""Imports that are allowed, beyond the import contracts in pyproject.toml."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("planner/**/*.py"), *ROOT.glob("calibration/**/*.py")])
# May print and read the environment: the command line, processes of their own, what runs a user's command,
# what puts the environment back as it was, and what holds it in a key of a library's answers.
TALKATIVE = (
    *(
        "planner/cli/",
        "calibration/probe/__main__.py",
        "calibration/probe/gauge.py",
        *("planner/capture/process_state.py", "planner/capture/settings.py", "planner/_support/worker.py"),
        "planner/_support/user_dirs.py",
    ),
    *("planner/hardware/cudnn/library_files.py", "planner/hardware/cudnn/worker.py"),
    *("planner/emulator/child/", "planner/emulator/launch.py", "planner/planning/check/revision.py"),
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def quiet_sources() -> list[Path]:
    return [path for path in SOURCES if not name(path).startswith(TALKATIVE)]


def loaded_after(statement: str) -> set[str]:
    """The top-level packages in memory after a statement in a fresh Python."""
    code = f"import sys; {statement}; print(*{{module.partition('.')[0] for module in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def outside_calls(tree: ast.AST) -> Iterator[str]:
    """Every `print(` and every use of the process environment in a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="print")):
                yield f"line {node.lineno}: print"
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv" | "putenv" as used):
                yield f"line {node.lineno}: os.{used}"
            case ast.ImportFrom(module="os", names=names):
                for imported in names:
                    if imported.name in ("environ", "getenv", "putenv"):
                        yield f"line {node.lineno}: os.{imported.name}"


def test_import_planner_is_bare() -> None:
    """`import planner` loads neither torch nor numpy, YAML or the terminal's libraries."""
    heavy = {"torch", "torchvision", "numpy", "scipy", "yaml", "typer", "click", "rich"}
    assert loaded_after("import planner") & heavy == set()


def test_devices_need_no_yaml_until_one_is_read() -> None:
    """A generic GPU is made without YAML, numpy or torch."""
    heavy = {"torch", "numpy", "yaml", "typer"}
    assert (
        loaded_after("from planner.hardware.device import generic_device; generic_device(24000)") & heavy
        == set()
    )


def test_outside_calls_are_found() -> None:
    """The search below finds prints and reads of the environment in every spelling, and nothing in text."""
    code = "import os\nfrom os import getenv\nprint(1)\nos.environ['A']\nos.getenv('A')\n'print(1)'\n"
    assert sorted(outside_calls(ast.parse(code))) == [
        "line 2: os.getenv",
        "line 3: print",
        "line 4: os.environ",
        "line 5: os.getenv",
    ]


@pytest.mark.parametrize("path", quiet_sources(), ids=name)
def test_only_the_command_line_prints_and_reads_the_environment(path: Path) -> None:
    """A module outside the command line neither prints nor reads environment variables."""
    assert list(outside_calls(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_every_module_says_what_it_is(path: Path) -> None:
    """A module begins with a docstring."""
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def entries_past_facades(path: Path) -> Iterator[str]:
    """Every import of a module inside another room of the planner, past the facade of that room.

    The functions of `planner.api` are called as their modules are, which a package cannot show both ways.
    """
    own = path.relative_to(ROOT).parts[:2]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        module = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
        parts = module.split(".")
        if (
            parts[0] != "planner"
            or len(parts) < 3
            or tuple(parts[:2]) == own
            or parts[1] in ("_support", "api")
        ):
            continue
        if not ROOT.joinpath(*parts, "__init__.pyi").exists():
            yield f"line {node.lineno}: {module}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_rooms_are_entered_by_their_facades(path: Path) -> None:
    """A module imports another room's names from a package whose stub lists them."""
    assert list(entries_past_facades(path)) == []


@pytest.mark.slow
def test_facades_list_what_other_rooms_take() -> None:
    """Each name that the stub of a room lists is taken outside of it, if only by a test."""
    taken = {
        (node.module, alias.name)
        for path in (*SOURCES, *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    listed = {
        (".".join(stub.parent.relative_to(ROOT).parts), alias.asname)
        for stub in ROOT.glob("planner/*/**/*.pyi")
        for node in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert listed - taken == set()


def test_a_visitor_sees_the_rooms_at_a_glance() -> None:
    """At most sixteen entries stand directly in the package."""
    entries = {path.name for path in (ROOT / "planner").iterdir()} - {"__pycache__"}
    assert len(entries) <= 16, sorted(entries)
