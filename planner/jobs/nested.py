"""Build nested arguments from the names of their tensors.

Nested arguments are dicts, tuples and lists of tensors. `images=3x224x224` is the argument `images`,
`batch.image=...` the entry "image" of the dict `batch`, `pair.0=...` an item of the tuple `pair`, and
`pair[0]=...` an item of the list `pair`. A number at the beginning is the position of an argument without a
name: `0.image=...` is an entry of the first argument. A target is named the same way, without an argument at
the beginning.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from planner.errors import UsageError
from planner.jobs.job import Job, Mode
from planner.jobs.parse import shown

T = TypeVar("T")


class _Key(NamedTuple):
    """One key or index in a path through nested containers."""

    kind: type[dict] | type[tuple] | type[list]  # type: ignore[type-arg]
    key: str | int


_Row = tuple[tuple[_Key, ...], T]


def nest_inputs(named: Iterable[tuple[str | None, T]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments built from named tensors.

    Raises UsageError if names conflict.
    """
    by_position: list[_Row[T]] = []
    by_keyword: list[_Row[T]] = []
    following = 0
    for name, value in named:
        path = (_Key(tuple, following),) if name is None else _path(name, head=True)
        if isinstance(path[0].key, int):
            following = max(following, path[0].key + 1)
            by_position.append((path, value))
        else:
            by_keyword.append((path, value))
    args = _build(by_position, "") if by_position else ()
    return args, _build(by_keyword, "") if by_keyword else {}


def nest_target(named: Iterable[tuple[str | None, T]]) -> Any:
    """Return the target of a loss from named tensors, or None if `named` is empty.

    Raises UsageError if a name is missing or names conflict.
    """
    rows = []
    for name, value in named:
        if name is None:
            raise UsageError("--target: of several, each needs a name, such as boxes=100x4, or 0=100x4")
        rows.append((_path(name, head=False), value))
    return _build(rows, "") if rows else None


def check_nesting(job: Job) -> None:
    """Raise UsageError if the names of a job's inputs or targets conflict or are incomplete."""
    for what, specs, nest in (
        ("--input", job.samples.inputs, nest_inputs),
        ("--target", job.samples.targets, nest_target),
    ):
        try:
            nest((spec.keyword, spec) for spec in specs)
        except UsageError as error:
            text = str(error).removeprefix("--target: ")
            raise UsageError(f"{job.model.name}: {what}: {text}") from None


def batch_of_specs(job: Job, make: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return a job's positional inputs, keyword inputs and target, each tensor made by `make`.

    `make` is called for positional inputs first, then for keyword inputs, then for targets. The target is
    None if the job has none, or if the mode is neither `TRAIN` nor `STEP`.
    """
    ordered = sorted(enumerate(job.samples.inputs), key=lambda place: place[1].keyword is not None)
    made = {place: make(spec) for place, spec in ordered}
    args, kwargs = nest_inputs((spec.keyword, made[place]) for place, spec in enumerate(job.samples.inputs))
    if job.loop.mode not in (Mode.TRAIN, Mode.STEP):
        return args, kwargs, None
    if job.samples.targets:
        return args, kwargs, nest_target((spec.keyword, make(spec)) for spec in job.samples.targets)
    return args, kwargs, None if job.samples.target is None else make(job.samples.target)


def _path(name: str, head: bool) -> tuple[_Key, ...]:
    """Split a tensor's name into the keys that lead to the tensor in nested containers.

    If `head` is true, the name begins with an argument. `parse_tensor_spec` must have accepted the name.
    """
    steps = re.findall(r"\[([0-9]+)\]|([^.\[\]]+)", name)
    keys = [_Key(list, int(item)) if item else _plain_key(key) for item, key in steps]
    if head and isinstance(keys[0].key, str):
        return (_Key(dict, keys[0].key), *keys[1:])
    return tuple(keys)


def _plain_key(key: str) -> _Key:
    return _Key(tuple, int(key)) if key.isdecimal() else _Key(dict, key)


def _build(rows: Sequence[_Row[T]], where: str) -> Any:
    """Return the nested value built from pairs of path and value.

    `where` names the nested value in errors.
    """
    if any(not path for path, _ in rows):
        if len(rows) > 1:
            raise UsageError(
                f"{shown(where)} is given twice, or is a tensor and holds others; name each once"
            )
        return rows[0][1]
    kinds = {path[0].kind for path, _ in rows}
    if len(kinds) > 1:
        raise UsageError(f"{shown(where)} has entries by name and by number, or of tuple and list; take one")
    (kind,) = kinds
    groups: dict[str | int, list[_Row[T]]] = {}
    for path, value in rows:
        groups.setdefault(path[0].key, []).append((path[1:], value))
    held = {key: _build(inner, _named(where, kind, key)) for key, inner in groups.items()}
    if kind is dict:
        return held
    missing = next((place for place in range(len(held)) if place not in held), None)
    if missing is not None:
        what = _named(where, kind, missing) if where else f"argument {missing}"
        raise UsageError(f"{what} is missing, of {len(held)} that are given; count from 0")
    return kind(held[place] for place in range(len(held)))


def _named(where: str, kind: type, key: str | int) -> str:
    if kind is list:
        return f"{where}[{key}]"
    return f"{where}.{key}" if where else str(key)
