"""Find the out-of-memory messages in the lines of a log, with the traceback before each message."""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise, takewhile

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
# What a launcher puts before each line of a process.
_WRITER = re.compile(
    r"^\s*(?:[A-Z][a-z]{2} +\d+ [\d:]{8} |\d{4}-\d\d-\d\dT\S{8,30} )?(?P<writer>"
    r"(?:[A-Za-z][\w.-]{0,99}\d: ?)?(?:\[(?:rank|default)? ?\d+\]|(?:rank|default) ?\d+):"  # torchrun, pdsh
    r"|[A-Za-z][\w.-]{0,99}\d: "  # pdsh
    r"|[A-Za-z][\w.-]{0,99}\d +\| "  # Docker Compose
    r"|(?:\[\d+m)?\([^()]{0,99}\bpid=\d+[^()]{0,99}\)(?:\[0m)? "  # Ray, whose escape characters may be lost
    r"|\[\d+,\d+\]<std(?:out|err)>:"  # Open MPI
    r"|\[pod/[\w./-]{1,200}\] "  # kubectl logs --prefix
    r"|[\w.-]{1,99} [\w./@-]{1,99}\[\d+\]: "  # journald, syslog
    r")\s?"
)
_NUMBER = re.compile(r"^\s*(?P<writer>\d{1,4}): |^\s*\d+:\s?")
_OF_DOCKER = re.compile(
    r'^\{"log": ?("(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*")'
)  # of its json-file driver
_CHAINED = "The above exception was the direct cause of the following exception"


class _Reader:
    """A reader that finds out-of-memory messages in the lines that one process writes to a log."""

    def __init__(self) -> None:
        self._before: deque[str] = deque(maxlen=_KEPT_LINES)
        self._text: list[str] = []
        self._frames: tuple[Frame, ...] = ()
        self._last = Message("", ())
        self._is_chained = False

    def read(self, line: str) -> Iterator[Message]:
        """Read a line, and yield the message that ends before it, if any."""
        begins, follows = _begins(line), bool(self._text)
        if self._text and (
            begins or len(self._text) == _MESSAGE_LINES or not line.strip() or read_frame(line)
        ):
            yield from self.end()
        if begins:
            if not follows:  # else the traceback before the last message is this one's too
                self._frames = read_frames(self._before)
            self._is_chained = any(_CHAINED in before for before in self._before)
            self._text = [line]
            self._before.clear()
        elif self._text:
            self._text.append(line)
        else:
            self._before.append(line)

    def end(self) -> Iterator[Message]:
        """End the message that is being read, and yield it if there is one.

        The message of a chained exception is not yielded if it repeats its cause's figures, as if a parent
        process raises a worker's exception again.
        """
        message = Message(_joined(self._text), self._frames)
        is_again = self._is_chained and any(message.figures) and message.figures == self._last.figures
        if message.detail is not None and not is_again:
            yield message
            self._last = message
        self._text = []


def read_messages(lines: Iterable[str]) -> Iterator[Message]:
    """Yield the out-of-memory messages of a log.

    Lines may begin with the name of the process that wrote them. A number is a process (`srun -l`) if it
    comes again: the number of a line, as `grep -n` writes it, does not.
    """
    readers, numbers = {"": _Reader()}, set[str]()
    for raw in lines:
        for line in _printed(raw):
            found = _WRITER.match(line) or _NUMBER.match(line)
            writer = (found["writer"] if found is not None else None) or ""
            if writer.isdecimal() and writer not in numbers:
                numbers.add(writer)
                writer = ""
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
    text = _CONTROL.sub("", raw).rstrip("\r\n").replace("\xa0", " ")
    docker = _OF_DOCKER.match(text)
    if docker is not None:
        text = str(json.loads(docker[1], strict=False)).rstrip("\r\n")
    if "\\n" in text and "Traceback (most recent call last)" in text:
        yield from text.replace('\\"', '"').split("\\n")
        return
    *overwritten, last = text.split("\r")
    if overwritten:
        yield from (part for part in overwritten if _begins(part) or read_frame(part))
    seconds = [found.start() for found in _FIGURES_FOLLOW.finditer(last)][1:]
    yield from (last[start:end] for start, end in pairwise([0, *seconds, len(last)]))


def _joined(lines: list[str]) -> str:
    """Return the lines of a message as one line.

    A terminal cuts within words if the first three lines or more have the same width.
    """
    full = sum(1 for _ in takewhile(lambda line: len(line) == len(lines[0]), lines))
    if full < 3:
        return " ".join(line.strip() for line in lines)
    return "".join(lines[: full + 1])


def _begins(line: str) -> bool:
    """Return whether a message begins in a line."""
    return _BEGINNING.search(line) is not None
