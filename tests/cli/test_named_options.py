"""Options that messages, reports and comments of the planner name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from planner.cli.parser import COMMANDS, build_command

ROOT = Path(__file__).parents[2]
# Options of other programs that the planner calls or whose settings it explains, and options of all commands.
OTHERS = {
    "git": {"--all", "--end-of-options", "--prefix", "--quiet", "--short", "--show-toplevel", "--verify"},
    "compilers": {"--defined-only", "--defsym", "--dyn-syms", "--version-script"},
    "slurm": {"--constraint", "--gres", "--nodes", "--ntasks-per-node"},
    "docker, servers and scripts": {"--batch-size", "--ipc", "--job", "--mem-fraction-static", "--shm-size"},
    "benchmarks": {"--from-csv"},
    "typer": {"--help", "--install-completion", "--no", "--show-completion", "--version"},
}


def named_options() -> Iterator[tuple[str, str]]:
    """Each option in a text of the planner's sources, with the file and line of the text."""
    for path in sorted([*ROOT.glob("planner/**/*.py"), *ROOT.glob("calibration/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", node.value):
                    yield name, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_named_options_exist() -> None:
    """An option that a text names is an option of a command, so that no message gives advice that fails."""
    commands = [build_command(name) for name in COMMANDS]
    own = {
        name for one in commands for option in one.params for name in (*option.opts, *option.secondary_opts)
    }
    others = set().union(*OTHERS.values())
    named = dict(named_options())
    assert own & named.keys()
    assert {name: place for name, place in named.items() if name not in own | others} == {}
    assert others <= named.keys()  # each exception is in use
