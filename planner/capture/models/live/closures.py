"""Make the closures of functions in a deep copy refer to copied objects.

`copy.deepcopy` does not copy functions: a function set on a module, such as a `forward` that calls the
previous `forward`, would still use the original module.
"""

from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any


def rebind_closures(holder: object, memo: Mapping[int, Any]) -> None:
    """Make the functions and methods that a deep copy holds refer to copied objects.

    `holder` is the copy. The functions are its attributes, or values of dicts among the attributes. Their
    closures, and the objects to which methods are bound, are replaced. `memo` is the memo of `copy.deepcopy`.
    """
    held = vars(holder)
    for values in (held, *[one for one in held.values() if isinstance(one, dict)]):
        for name, value in values.items():
            if isinstance(value, FunctionType | MethodType):
                values[name] = _over_copies(value, memo)


def _over_copies(value: Any, memo: Mapping[int, Any]) -> Any:
    if isinstance(value, MethodType):
        owner = memo.get(id(value.__self__), value.__self__)
        return MethodType(_over_copies(value.__func__, memo), owner)
    if not isinstance(value, FunctionType):
        return memo.get(id(value), value)
    cells = [_copied_cell(cell, value, memo) for cell in value.__closure__ or ()]
    if all(new is old for new, old in zip(cells, value.__closure__ or (), strict=True)):
        return value
    made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    made.__kwdefaults__ = value.__kwdefaults__
    made.__dict__.update(value.__dict__)
    return made


def _copied_cell(cell: CellType, of: FunctionType, memo: Mapping[int, Any]) -> CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    if held is of:  # a function that calls itself
        return cell
    changed = _over_copies(held, memo)
    is_same = changed is held or (isinstance(held, MethodType) and changed == held)
    return cell if is_same else CellType(changed)
