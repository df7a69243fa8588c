"""Check out a revision of a project's git repository in a temporary folder.

The repository is not changed: the files are checked out through a temporary index, and no worktree is
registered.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from planner.errors import UsageError

_GIVEN_BY_HOOKS = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_PREFIX",
)  # git sets these for the commands of its hooks


class Revision(Struct, frozen=True):
    """A revision that is checked out in a temporary folder."""

    name: str  # as given
    commit: str  # abbreviated
    folder: Path  # the project's folder at the revision


@contextmanager
def export_revision(folder: Path, name: str) -> Iterator[Revision]:
    """Check out a revision of the project at `folder` to a temporary folder, and yield the `Revision`.

    The checked-out files are deleted on exit. Raises UsageError if git fails, or if the revision does not
    contain the folder.
    """
    top = Path(_git(folder, "rev-parse", "--show-toplevel", name=name))
    commit = _git(
        folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}", name=name
    )
    short = _git(folder, "rev-parse", "--short", commit, name=name)
    with TemporaryDirectory(prefix="planner-") as temporary:
        tree, index = Path(temporary) / "tree", str(Path(temporary) / "index")
        _git(top, "read-tree", commit, name=name, index=index)
        _git(top, "checkout-index", "--all", f"--prefix={tree}/", name=name, index=index)
        inner = tree / folder.resolve().relative_to(top.resolve())
        if not inner.is_dir():
            raise UsageError(f"--against {name}: the folder of the configuration was not there then")
        yield Revision(name, short, inner)


def _git(folder: Path, *arguments: str, name: str, index: str | None = None) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in _GIVEN_BY_HOOKS}
    if index is not None:
        environment["GIT_INDEX_FILE"] = index
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        raise UsageError(f"--against {name}: there is no git; install it") from None
    except subprocess.CalledProcessError as error:
        problem = " ".join(error.stderr.split())[:200] or "no such revision; fetch it, with its history"
        raise UsageError(f"--against {name}: {problem}") from None
    return done.stdout.strip()
