"""A compute capability that records every comparison made with it as a guard. Another capability for which
all guards hold takes the same code path.
"""

from typing import Any

Capability = tuple[int, int]
Comparison = tuple[str, Any]  # a comparison and its operand, or "item" and an index


class GuardedCapability(tuple[int, int]):
    """Equal to the capability that it is made from; `guards` fills while it is used."""

    guards: dict[Comparison, Any]

    def __new__(cls, capability: Capability) -> "GuardedCapability":
        self = super().__new__(cls, capability)
        self.guards = {}
        return self

    def _note(self, comparison: str, operand: Any, answer: Any) -> Any:
        self.guards[comparison, operand] = answer
        return answer

    def __eq__(self, other: object) -> bool:
        return bool(self._note("__eq__", other, tuple.__eq__(self, other)))

    def __ne__(self, other: object) -> bool:
        return bool(self._note("__ne__", other, tuple.__ne__(self, other)))

    def __lt__(self, other: tuple[int, ...]) -> bool:
        return bool(self._note("__lt__", other, tuple.__lt__(self, other)))

    def __le__(self, other: tuple[int, ...]) -> bool:
        return bool(self._note("__le__", other, tuple.__le__(self, other)))

    def __gt__(self, other: tuple[int, ...]) -> bool:
        return bool(self._note("__gt__", other, tuple.__gt__(self, other)))

    def __ge__(self, other: tuple[int, ...]) -> bool:
        return bool(self._note("__ge__", other, tuple.__ge__(self, other)))

    def __hash__(self) -> int:
        """Return the hash; a hash lookup depends on the exact value."""
        return int(self._note("__hash__", None, tuple.__hash__(self)))

    def __getitem__(self, index: Any) -> Any:
        return self._note("__getitem__", index, tuple.__getitem__(self, index))

    def __iter__(self) -> Any:
        """Iterate; unpacking depends on the exact value as well."""
        self._note("__hash__", None, tuple.__hash__(self))
        return tuple.__iter__(self)

    def guards_hold(self, other: Capability) -> bool:
        """Return whether all comparisons come out the same for another capability."""
        for (comparison, operand), answer in self.guards.items():
            arguments = () if comparison == "__hash__" else (operand,)
            if getattr(tuple, comparison)(other, *arguments) != answer:
                return False
        return True
