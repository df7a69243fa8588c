"""Find the out-of-memory messages in the lines of a log, with the traceback before each message."""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise

from planner.planning.diagnosis.messages import MESSAGE, Message
from planner.planning.diagnosis.tracebacks import Frame, read_frame, read_frames
from planner.planning.diagnosis.without_figures import BACKENDS, WITHOUT_FIGURES

_KEPT_LINES = 400  # lines kept before a message; the longest tracebacks of trainers have some 120
_MOST_WRITERS = 4096  # processes that are told apart, so that a log of any size takes little memory
_MESSAGE_LINES = 8  # lines over which a terminal may wrap a message
# Each line of a log is searched once, which takes less time than a search for each pattern.
_BEGINNING = re.compile("|".join((MESSAGE.pattern, *(one.pattern.pattern for one in WITHOUT_FIGURES))))
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FIGURES_FOLLOW = re.compile(rf"(?:{BACKENDS}) out of memory\. Tried")
# What a launcher puts before each line of a process. A number alone may be a line's or an hour.
_WRITER = re.compile(
    r"^\s*(?:\d+:|(?P<writer>"
    r"(?:[A-Za-z][\w.-]{0,99}\d: ?)?(?:\[(?:rank|default)? ?\d+\]|(?:rank|default) ?\d+):"  # torchrun, pdsh
    r"|[A-Za-z][\w.-]{0,99}\d: "  # pdsh
    r"|[A-Za-z][\w.-]{0,99}\d +\| "  # Docker Compose
    r"|(?:\[\d+m)?\([^()]{0,99}\bpid=\d+[^()]{0,99}\)(?:\[0m)? "  # Ray, whose escape characters may be lost
    r"))\s?"
)


class _Reader:
    """A reader of the lines that one process writes to a log."""

    def __init__(self) -> None:
        self._before: deque[str] = deque(maxlen=_KEPT_LINES)
        self._text: list[str] = []
        self._frames: tuple[Frame, ...] = ()

    def read(self, line: str) -> Iterator[Message]:
        """Read a line, and yield the message that ends before it.

        Nothing is yielded if no message ends there.
        """
        begins, follows = _begins(line), bool(self._text)
        if self._text and (
            begins or len(self._text) == _MESSAGE_LINES or not line.strip() or read_frame(line)
        ):
            yield from self.end()
        if begins:
            if not follows:  # else the traceback before the last message is this one's too
                self._frames = read_frames(self._before)
            self._text = [line.strip()]
            self._before.clear()
        elif self._text:
            self._text.append(line.strip())
        else:
            self._before.append(line)

    def end(self) -> Iterator[Message]:
        """Yield the message that is not yet ended, if there is one."""
        message = Message(" ".join(self._text), self._frames)
        if message.detail is not None:
            yield message
        self._text = []


def read_messages(lines: Iterable[str]) -> Iterator[Message]:
    """Yield the out-of-memory messages of a log.

    Lines may begin with the name of the process that wrote them.
    """
    readers = {"": _Reader()}
    for raw in lines:
        for line in _printed(raw):
            found = _WRITER.match(line)
            writer = (found["writer"] if found is not None else None) or ""
            if writer not in readers and len(readers) < _MOST_WRITERS:
                readers[writer] = _Reader()
            reader = readers.get(writer, readers[""])
            yield from reader.read(line if found is None else line[found.end() :])
    for reader in readers.values():
        yield from reader.end()


def _printed(raw: str) -> Iterator[str]:
    """Yield the lines that a terminal shows for a line of a log.

    Text that progress bars overwrite is left out. Overwritten text is yielded if a message begins in it or it
    names a frame. A traceback within a string of JSON has several lines. Messages that processes wrote to one
    line are on a line each.
    """
    text = _CONTROL.sub("", raw).rstrip("\r\n")
    if "\\n" in text and "Traceback (most recent call last)" in text:
        yield from text.replace('\\"', '"').split("\\n")
        return
    *overwritten, last = text.split("\r")
    if overwritten:
        yield from (part for part in overwritten if _begins(part) or read_frame(part))
    seconds = [found.start() for found in _FIGURES_FOLLOW.finditer(last)][1:]
    yield from (last[start:end] for start, end in pairwise([0, *seconds, len(last)]))


def _begins(line: str) -> bool:
    """Return whether a message begins in a line."""
    return _BEGINNING.search(line) is not None
