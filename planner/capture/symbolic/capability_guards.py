"""A compute capability that remembers what was asked of it: another one of which all answers are the same
leads a run down the same path.
"""

from typing import Any

Capability = tuple[int, int]
Question = tuple[str, Any]  # a comparison and its operand, or "item" and an index


class Watched(tuple[int, int]):
    """Equal to the capability that it is made from; `asked` fills while it is used."""

    asked: dict[Question, Any]

    def __new__(cls, capability: Capability) -> "Watched":
        self = super().__new__(cls, capability)
        self.asked = {}
        return self

    def _note(self, question: str, operand: Any, answer: Any) -> Any:
        self.asked[question, operand] = answer
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
        """Asking a table is asking for the whole value."""
        return int(self._note("__hash__", None, tuple.__hash__(self)))

    def __getitem__(self, index: Any) -> Any:
        return self._note("__getitem__", index, tuple.__getitem__(self, index))

    def __iter__(self) -> Any:
        """Neither is taking it apart."""
        self._note("__hash__", None, tuple.__hash__(self))
        return tuple.__iter__(self)

    def agrees(self, other: Capability) -> bool:
        """Whether `other` answers all that was asked as this one did."""
        for (question, operand), answer in self.asked.items():
            arguments = () if question == "__hash__" else (operand,)
            if getattr(tuple, question)(other, *arguments) != answer:
                return False
        return True
