"""Load the pickle of a memory snapshot as a stream, without executing anything in the file.

A pickle may name callables, which are then called. Torch's snapshots contain only containers, numbers and
texts, which need no names, so a file that names an object is refused.

A snapshot of a long training run has millions of events. Each event becomes a row when it is read, each stack
of frames becomes a line of the user's code, and only the last events of each device are kept. So the memory
needed does not grow with the file: the parts of events leave the pickle's memo, and all other objects are
counted.
"""

import pickle
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from itertools import islice
from typing import Any, ClassVar, NoReturn

from planner._support.conversion import shown
from planner.allocator.history.history import ACTIONS, MOST_EVENTS, HistoryEvent
from planner.allocator.history.stacks import NO_STACK, Origin, Stack

_MOST_OBJECTS = 2**22  # parts of events not counted; a snapshot with 100,000 blocks has a million
_MOST_PARTS = 2**16  # parts of events (three or four per event) to which later events may refer
_MOST_STACKS = 2**16  # a training run has some thousand different stacks
_LONGEST_STACK = 2**10  # bytes of the references to its frames, five per frame
_LONGEST_TEXT = 2**24  # bytes
_MOST_BITS = 128  # longest number that is a key
_OPCODES_BETWEEN_CHECKS = 2**16
# BINGET, LONG_BINGET, and the length of a pickle's frame
_REFERENCE = re.compile(rb"h(.)|j(....)|\x95.{8}", re.DOTALL)
_REFERENCES = re.compile(rb"(?:h.|j....|\x95.{8})+e", re.DOTALL)  # to the end of a list

_base: Any = pickle  # its unpickler in Python has `stack`, `memo` and `dispatch`, which its stub lacks


class EventRows:
    """The last `MOST_EVENTS` events of a device as rows (`HistoryEvent`), with the count of all events.

    `sites` maps each site to its index. The streams of rows are handles, not numbers.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[HistoryEvent] = deque(maxlen=MOST_EVENTS)
        self.sites: dict[Origin, int] = {}


class SnapshotList(list[Any]):
    """A list in a snapshot, without its events, which are kept in `rows`."""

    __slots__ = ("next_place", "objects_before", "rows")

    def __init__(self, objects_before: int) -> None:
        super().__init__()
        self.objects_before = objects_before
        self.next_place: int | None = None  # memo index of the parts of its next item
        self.rows: EventRows | None = None


def load_stream(file: BufferedReader) -> object:
    """Load a snapshot's pickle, with lists of frames as `Stack` and other lists as `SnapshotList`.

    Raises ValueError and the errors of `pickle` for content that no snapshot has.
    """
    return _StreamUnpickler(file).load()


class _Memo(dict[int, Any]):
    """The memo of the unpickler, from which older parts of events are dropped.

    A dropped object is read as `NO_STACK`. Torch records some frees with the stack of the allocation, which
    may be millions of events before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0  # number of objects, including dropped objects
        self._parts: deque[int] = deque()

    def __setitem__(self, place: int, value: Any) -> None:
        self.count += place not in self
        super().__setitem__(place, value)
        if type(value) is SnapshotList:
            value.next_place = place + 1

    def __missing__(self, place: int) -> Stack:
        if place >= self.count:
            raise KeyError(place)
        return NO_STACK

    def pass_events(self, place: int) -> None:
        """Queue the memo entries of the events from `place` on, and drop queued entries beyond `_MOST_PARTS`.

        The oldest entries are dropped. Texts and frames stay, since many events share them.
        """
        values = ((one, self.get(one)) for one in range(place, self.count))
        self._parts.extend(one for one, value in values if not (type(value) is str or _is_frame(value)))
        while len(self._parts) > _MOST_PARTS:
            self.pop(self._parts.popleft(), None)


class _StreamUnpickler(_base._Unpickler):  # type: ignore[misc]
    """An unpickler that loads only containers, numbers and texts.

    It refuses objects, and reduces events to rows. It derives from the unpickler in Python; the C version
    allocates memory for any memo index. Keys must be texts or numbers, since hashing tuples nested in doubled
    tuples never ends.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]]

    def __init__(self, file: BufferedReader) -> None:
        super().__init__(file)
        self.readline: Callable[[], bytes] = lambda: file.readline(_LONGEST_TEXT)
        self.memo = _Memo()
        self._file, self.read = file, file.read
        self.metastack: list[list[Any]] = []
        self._objects = 0
        self._stacks: dict[bytes, Stack] = {}  # by the references to their frames

    def load(self) -> object:
        """Load the pickle and return its object. Raises ValueError for too many objects besides events."""
        self.stack, self.proto = [], 0
        self.append = self.stack.append
        codes = iter(lambda: self.read(1), b"")
        dispatch = self.dispatch
        try:
            while self._is_within_limits():
                code = b""
                for code in islice(codes, _OPCODES_BETWEEN_CHECKS):
                    dispatch[code[0]](self)
                if not code:
                    raise EOFError("the file ends too early")
        except _base._Stop as stop:
            return stop.value
        raise ValueError(f"it has more than {_MOST_OBJECTS:,} objects besides events")

    def _is_within_limits(self) -> bool:
        waiting = sum(1 + len(one) for one in (self.stack, *self.metastack))
        return waiting + len(self.memo) + self._objects <= _MOST_OBJECTS

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise ValueError(f"it names {module_name}.{global_name}, which no snapshot does")

    def persistent_load(self, pid: object) -> NoReturn:
        raise ValueError("it refers to objects outside of itself")

    # ---- opcodes, by their names in the base class

    def load_frame(self) -> None:
        self.read(8)  # the frame's length, which is a hint

    def load_mark(self) -> None:
        """Begin a list, a mapping or a tuple, or read a whole list at once if it is a stack of frames."""
        is_in_list = bool(self.stack) and type(self.stack[-1]) is SnapshotList and not self.stack[-1]
        references = _REFERENCES.match(self._file.peek()) if is_in_list else None
        if references is None:
            super().load_mark()
            return
        self.read(references.end())
        stack = self._stacks.get(references[0])
        if stack is not None:
            self._replace_by_stack(self.stack[-1], stack)
            return
        self._extend([self.memo[place] for place in _places(references[0])])
        is_kept = len(self._stacks) < _MOST_STACKS and references.end() <= _LONGEST_STACK
        if is_kept and type(self.stack[-1]) is Stack:
            self._stacks[references[0]] = self.stack[-1]

    def load_binunicode(self) -> None:
        size_bytes = int.from_bytes(self.read(4), "little")
        if size_bytes > _LONGEST_TEXT:
            raise ValueError(f"it has a text of {size_bytes:,} bytes")
        self.append(self.read(size_bytes).decode("utf-8", "surrogatepass"))

    def refuse(self) -> NoReturn:
        raise ValueError("it has bytes or a set, which no snapshot has")

    def load_empty_list(self) -> None:
        self._objects += 1
        self.append(SnapshotList(self._objects))

    def load_list(self) -> None:
        items = self.pop_mark()
        self.load_empty_list()
        self._extend(items)

    def load_empty_dictionary(self) -> None:
        self._objects += 1
        self.append({})

    def load_dict(self) -> None:
        _check_keys(self.stack[::2])
        self._objects += 1
        super().load_dict()

    def load_tuple(self) -> None:
        self._objects += 1
        super().load_tuple()

    def load_tuple1(self) -> None:
        self._objects += 1
        super().load_tuple1()

    def load_tuple2(self) -> None:
        self._objects += 1
        super().load_tuple2()

    def load_tuple3(self) -> None:
        self._objects += 1
        super().load_tuple3()

    def load_setitem(self) -> None:
        _check_keys([self.stack[-2]])
        self._objects += 1
        super().load_setitem()

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])
        self._objects += len(self.stack) // 2
        super().load_setitems()

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def load_memoize(self) -> None:
        self.memo[self.memo.count] = self.stack[-1]  # not the memo's length, since parts were dropped

    load_frozenset = load_empty_set = load_additems = refuse
    load_binbytes = load_binbytes8 = load_bytearray8 = load_next_buffer = refuse
    load_binunicode8 = load_binstring = load_long4 = refuse

    # ---- helpers of the opcodes

    def _extend(self, items: list[Any]) -> None:
        """Add items to the list on top of the unpickler's stack.

        Frames turn the list into a `Stack`, and events are added to its rows.
        """
        target = self.stack[-1]
        if type(target) is Stack:  # more frames of the same stack
            if target is not NO_STACK and all(map(_is_frame, items)):
                target.extend(items)
            return
        if type(target) is not SnapshotList:
            raise ValueError("it extends what is no list")
        if not target and items and all(map(_is_frame, items)):
            self._replace_by_stack(target, Stack(items))
        elif items and all(map(_is_event, items)):
            self._add_events(target, items)
        elif any(type(one) is Stack for one in items):
            raise ValueError("it refers to an event too many events ago")
        else:
            self._objects += len(items)
            target.extend(items)

    def _replace_by_stack(self, target: SnapshotList, stack: Stack) -> None:
        self.stack[-1] = stack
        if target.next_place is not None:
            self.memo[target.next_place - 1] = stack
        self._objects = target.objects_before

    def _add_events(self, target: SnapshotList, events: list[dict[str, Any]]) -> None:
        rows = target.rows = target.rows or EventRows()
        found = [_row(event, rows.sites) for event in events if event["action"] in ACTIONS]
        rows.count += len(found)
        rows.last.extend(found)
        if target.next_place is not None:
            self.memo.pass_events(target.next_place)
            target.next_place = self.memo.count
        self._objects = target.objects_before


_StreamUnpickler.dispatch = {
    code: getattr(_StreamUnpickler, load.__name__) for code, load in _base._Unpickler.dispatch.items()
}


def _places(references: bytes) -> Iterator[int]:
    """Yield the memo indices to which the opcodes in `references` refer."""
    for one in _REFERENCE.finditer(references):
        if place := one[1] or one[2]:
            yield int.from_bytes(place, "little")


def _check_keys(keys: Sequence[object]) -> None:
    for key in keys:
        if not (type(key) is str or (isinstance(key, int) and key.bit_length() <= _MOST_BITS)):
            raise ValueError("a key is neither a text nor a number")


def _is_frame(value: object) -> bool:
    return type(value) is dict and "filename" in value


def _is_event(value: object) -> bool:
    return type(value) is dict and isinstance(value.get("action"), str)


def _row(event: dict[str, Any], sites: dict[Origin, int]) -> HistoryEvent:
    action, stack = event["action"], event.get("frames")
    origin = (stack if type(stack) is Stack else NO_STACK).origin
    return HistoryEvent(
        action,
        count_of(event, "device_free" if action == "oom" else "addr"),
        count_of(event, "size"),
        sites.setdefault(origin, len(sites)),
        count_of(event, "stream"),
    )


def count_of(entry: dict[str, Any], key: str) -> int:
    """Return a size, address or stream from an entry, or 0 if it is missing.

    The entry is an event or a segment. Raises ValueError for other values.
    """
    value = entry.get(key, 0)  # an `oom` of older versions of torch has no free memory
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(f"device_traces: {key} is {shown(value)}, which is no size, address or stream")
    return value
