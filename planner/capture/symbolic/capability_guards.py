"""Record every comparison with a compute capability as a guard.

Another capability for which all guards hold takes the same code path.
"""

from typing import Any

from planner.program import Capability

Comparison = tuple[str, Any]  # the name of a method of tuples, and its operand


def _guarded(comparison: str) -> Any:
    """Return a method that calls the method `comparison` of tuples and records its result as a guard."""

    def method(self: "GuardedCapability", operand: Any) -> Any:
        answer = self.guards[comparison, operand] = getattr(tuple, comparison)(self, operand)
        return answer

    return method


class GuardedCapability(tuple[int, int]):
    """A compute capability that records the results of all comparisons in `guards`."""

    guards: dict[Comparison, Any]

    def __new__(cls, capability: Capability) -> "GuardedCapability":
        self = super().__new__(cls, capability)
        self.guards = {}
        return self

    __eq__, __ne__, __getitem__ = map(_guarded, ("__eq__", "__ne__", "__getitem__"))
    __lt__, __le__, __gt__, __ge__ = map(_guarded, ("__lt__", "__le__", "__gt__", "__ge__"))

    def __hash__(self) -> int:
        """Return the hash, and record it as a guard. A hash lookup depends on the exact value."""
        value = self.guards["__hash__", None] = tuple.__hash__(self)
        return value

    def __iter__(self) -> Any:
        """Return an iterator, and record the hash as a guard. Unpacking depends on the exact value."""
        hash(self)
        return tuple.__iter__(self)

    def guards_hold(self, other: Capability) -> bool:
        """Return whether all recorded comparisons have the same results for another capability."""
        for (comparison, operand), answer in self.guards.items():
            arguments = () if comparison == "__hash__" else (operand,)
            if getattr(tuple, comparison)(other, *arguments) != answer:
                return False
        return True
