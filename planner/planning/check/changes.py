"""Compare the memory of jobs between two revisions of a project, and name the modules that changed most."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from planner.planning.attribution import LiveBlock
from planner.planning.check.config import Headroom
from planner.planning.check.rows import CheckRow

NAMED_SHARE = 0.8  # a module with this share of its parent's change is named instead of the parent
MOST_MODULES = 5
SMALLEST_BYTES = 2**20  # the smallest change that counts: below it, figures of nvidia-smi are equal


class ModuleChange(Struct, frozen=True):
    """A module, and the change of its memory at the allocated peak."""

    name: str  # empty for the whole model, or for memory outside of modules
    change_bytes: int


class CheckChange(Struct, frozen=True):
    """The change of the memory of a job's process on a GPU since an earlier revision."""

    row: CheckRow  # at the present revision
    before_bytes: int  # bytes of the process at the earlier revision
    module: ModuleChange | None  # the innermost module with most of the change; None if nothing changed
    modules: tuple[ModuleChange, ...]  # changes without inner modules, in descending order of absolute change

    @property
    def change_bytes(self) -> int:
        """Return the growth of the process in bytes, negative if the process has shrunk."""
        return self.row.estimate.process_bytes - self.before_bytes

    def exceeds(self, most: Headroom | None) -> bool:
        """Return whether `most` is given and the process has grown by more than `most`.

        A share is of the earlier memory of the process.
        """
        return most is not None and self.change_bytes > most.of(self.before_bytes)


class Comparison(Struct, frozen=True):
    """The changes of the memory of a check's jobs since an earlier revision."""

    revision: str
    commit: str
    max_increase: Headroom | None  # the check fails beyond this increase; None if no increase fails it
    changes: tuple[CheckChange, ...]
    missing: tuple[tuple[str, str], ...]  # jobs that could not be planned at the revision, and why

    @property
    def is_yes(self) -> bool:
        """Return whether the check passes, that is, no job has grown by more than `max_increase`."""
        return not any(change.exceeds(self.max_increase) for change in self.changes)


def own_bytes(blocks: Iterable[LiveBlock]) -> dict[str, int]:
    """Sum the bytes of blocks for each module, without the blocks of its submodules."""
    sizes: dict[str, int] = {}
    for block in blocks:
        sizes[block.module] = sizes.get(block.module, 0) + block.size_bytes
    return sizes


def module_changes(
    before: Mapping[str, int], after: Mapping[str, int]
) -> tuple[ModuleChange | None, tuple[ModuleChange, ...]]:
    """Return the module responsible for most of the change between two peaks, and the most changed modules.

    The first result is the innermost module with NAMED_SHARE of the change of its parent, and so on up to
    the model. If the change is spread over the model, it is the module whose own change is largest in the
    same direction. It is None if nothing changed. `before` and `after` are bytes by module, as
    `own_bytes` returns them.

    >>> module_changes({"a.b": 10, "c": 5}, {"a.b": 30, "c": 6})[0]
    ModuleChange(name='a.b', change_bytes=20)
    """
    names = dict.fromkeys((*after, *before))
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    changes = {name: change for name, change in changes.items() if change}
    total = sum(changes.values())
    listed = [ModuleChange(*item) for item in sorted(changes.items(), key=lambda item: -abs(item[1]))]
    alike = [one for one in listed if one.name and one.change_bytes * (total or 1) > 0]
    innermost = _innermost(changes, ModuleChange("", total))
    named = innermost if innermost.name or not alike else alike[0]
    return (named if changes else None), tuple(listed[:MOST_MODULES])


def _innermost(changes: Mapping[str, int], outer: ModuleChange) -> ModuleChange:
    """Descend from `outer` to children with NAMED_SHARE of their parent's change; return the last module."""
    inner: dict[str, int] = {}
    prefix = f"{outer.name}." if outer.name else ""
    for module, change in changes.items():
        if module and module.startswith(prefix) and module != outer.name:
            child = prefix + module.removeprefix(prefix).partition(".")[0]
            inner[child] = inner.get(child, 0) + change
    if not outer.change_bytes or not inner:
        return outer
    largest = max(inner, key=lambda child: inner[child] / outer.change_bytes)
    if inner[largest] / outer.change_bytes < NAMED_SHARE:
        return outer
    return _innermost(changes, ModuleChange(largest, inner[largest]))
