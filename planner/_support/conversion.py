"""Convert plain values from JSON and YAML to typed Structs, with errors that name the field.

msgspec does the conversion. The errors of msgspec name Python's types and no value, so this module writes the
messages.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")
Key = str | int  # a key of a mapping, or an index of a list

Text = Annotated[str, msgspec.Meta(pattern=r"\S")]  # a string that is not blank
MAX_SHOWN = 60
LARGEST = 2**50  # upper bound of counts and sizes in bytes; messages do not name it
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]

_MOST_BITS = 1000  # limit of whole numbers that messages quote; Python refuses to write out 15,000 bits

_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_OF_TYPES = ("Expected", "Invalid", "Number out of range", "Integer value out of range")
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`")


class ConversionError(ValueError):
    """The error for a value that does not have its declared type."""

    def __init__(self, path: Sequence[Key], what: str) -> None:
        place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
        super().__init__(f"{place}: {what}" if place else what)
        self.path = path
        self.what = what


def convert(value: Any, kind: type[T]) -> T:
    """Convert a value to a type, without coercion except from int to float. Raises ConversionError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), value, kind) from None


def decode_json(content: bytes, kind: type[T]) -> T:
    """Decode a JSON document and convert it to the type `kind`.

    Raises ValueError for invalid JSON, ConversionError, which is a ValueError, and RecursionError.
    """
    return convert(msgspec.json.decode(content), kind)


def _explained(message: str, value: Any, kind: Any) -> ConversionError:
    match = _PLACE.fullmatch(message)
    what, place = (match["what"], match["path"] or "") if match else (message, "")
    path: list[Key] = []
    expected: msgspec.inspect.Type | None = msgspec.inspect.type_info(kind)
    for name, index in _STEP.findall(place.partition("[...]")[0]):  # [...]: an entry of a dict
        key: Key = name or int(index)
        value = value[key]
        path.append(key)
        expected = _type_at(expected, key)
    field = _FIELD.fullmatch(what)
    if field and field[1] == "missing required":
        return ConversionError(path, f"missing {field[2]}")
    if field:
        names = ", ".join(one.encode_name for one in _fields(expected))
        return ConversionError([*path, field[2]], f"unknown key; known are {names}")
    if what.startswith(_OF_TYPES) and expected is not None and "[...]" not in place:
        return ConversionError(path, f"expected {_described(expected)}, got {shown(value)}")
    name, colon, rest = what.partition(": ")  # the message of a Struct's own check
    if colon and isinstance(value, dict) and name in value:
        return ConversionError([*path, name], rest)
    return ConversionError(path, what)


def shown(value: Any) -> str:
    """Return a value as messages show it: at most `MAX_SHOWN` characters, lists and dicts without items."""
    if isinstance(value, dict):
        return "keys with values"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return "a number of many digits"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _options(kind: msgspec.inspect.Type | None) -> Iterable[msgspec.inspect.Type | None]:
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _fields(kind: msgspec.inspect.Type | None) -> Sequence[msgspec.inspect.Field]:
    return next((one.fields for one in _options(kind) if isinstance(one, msgspec.inspect.StructType)), ())


def _type_at(kind: msgspec.inspect.Type | None, key: Key) -> msgspec.inspect.Type | None:
    """Return the type that `kind` declares for the entry at `key`, or None if it declares no such entry."""
    if isinstance(key, str):
        return next((field.type for field in _fields(kind) if field.encode_name == key), None)
    for one in _options(kind):
        if isinstance(one, msgspec.inspect.TupleType):
            return one.item_types[key]
        if isinstance(one, msgspec.inspect.CollectionType):
            return one.item_type
    return None


def _described(kind: msgspec.inspect.Type) -> str:
    """Return a phrase that names a type and its bounds, such as "a whole number from 1 to 5"."""
    match kind:
        case msgspec.inspect.Metadata():
            return _described(kind.type)
        case msgspec.inspect.UnionType():
            return " or ".join(_described(one) for one in kind.types)
        case msgspec.inspect.EnumType():
            return "one of " + ", ".join(str(member.value) for member in kind.cls)
        case msgspec.inspect.LiteralType():
            return ("one of " if len(kind.values) > 1 else "") + ", ".join(map(str, kind.values))
        case msgspec.inspect.IntType():
            return "a whole number" + _bounds(kind)
        case msgspec.inspect.FloatType():
            return "a number" + _bounds(kind)
        case msgspec.inspect.TupleType():
            each = {_described(one) for one in kind.item_types}
            return f"a list of {len(kind.item_types)}" + (f", each {each.pop()}" if len(each) == 1 else "")
        case msgspec.inspect.CollectionType():
            return "a list" if not kind.min_length else f"a list of at least {kind.min_length}"
    return _NOUNS.get(type(kind), "another value")


_NOUNS: dict[type, str] = {
    msgspec.inspect.StrType: "a string",
    msgspec.inspect.BoolType: "true or false",
    msgspec.inspect.NoneType: "null",
    msgspec.inspect.StructType: "keys with values",
    msgspec.inspect.DictType: "keys with values",
}


def _bounds(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None and kind.le < LARGEST:
        return f" from {kind.ge:,} to {kind.le:,}"
    if kind.gt is not None:
        return f" above {kind.gt:,}"
    return "" if kind.ge is None else f" of at least {kind.ge:,}"
