"""Read the frames of a traceback that Python, a notebook, rich or pytest printed."""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/torch/|<frozen|<string>|/lib/python\d|/python\d+/lib/", re.IGNORECASE
)
_FILE = r"(?P<file>(?:[A-Za-z]:|~|\.)?[\\/][^\s:\"]{1,400}\.py|<ipython-input-[^>]+>)"
_FRAMES = tuple(
    map(
        re.compile,
        (
            r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$',
            rf"^File {_FILE}:(?P<line>\d+), in (?P<function>.+)$",  # IPython 8
            r"^(?P<file>(?:Cell|Input) In ?\[\d+\]),(?: line (?P<line>\d+),?)?(?: in (?P<function>.+))?$",
            rf"^{_FILE} in (?P<function>.+)$",  # IPython 7, Colab
            rf"^\W{{0,9}}{_FILE}:(?P<line>\d+) in (?P<function>[\w.<>]+)\W*$",  # rich
            r"^(?P<file>[^\s:\"]{1,400}\.py):(?P<line>\d+): ?(?:in (?P<function>[\w.<>]+))?$",  # pytest
        ),
    )
)
# The line of code that failed, with its number: of IPython, and of rich.
_FAILED_LINE = re.compile(r"^(?:-+> ?|\W{0,9}❱ *)(?P<line>\d+)(?: *│)?(?P<code>.*)$")

_MARKS = re.compile(r"^ *(?P<call>~*(?P<operator>\^+))~* *$")  # below the code, since Python 3.11

_BOXED_PATH = re.compile(r"^│ (?P<path>(?:[A-Za-z]:|~|\.)?[\\/][^│]*[^│ ]) *│$")  # rich
_DEFINITION = re.compile(r"^\s+(?:async )?def (?P<function>\w+)\(")


class Frame(Struct, frozen=True):
    """One frame of a traceback, with the source code of its line."""

    file: str
    line: str
    function: str
    code: str = ""
    failed: str = ""  # the operator, or the whole call, that marks below the code name

    @property
    def is_of_user(self) -> bool:
        """Return whether the file belongs to the user, not to a library."""
        return _LIBRARY.search(self.file.replace("\\", "/")) is None


def read_frames(lines: Iterable[str]) -> tuple[Frame, ...]:
    """Return the frames of the last traceback in the lines, the innermost last."""
    given = list(_unfolded(lines))
    starts = [at for at, line in enumerate(given) if "Traceback (most recent call last)" in line]
    given = given[starts[-1] :] if starts else given
    frames: list[Frame] = []
    before = ""
    defined = None  # the function whose source pytest prints before its line's number
    for line, after in pairwise([*given, ""]):
        frame, failed, marks = read_frame(line), _FAILED_LINE.match(line), _MARKS.match(line)
        if frame is not None:
            if defined is not None and " in " not in line:
                frame = replace(frame, function=defined["function"])
            is_code = frame.line and not (read_frame(after) or _FAILED_LINE.match(after))
            frames.append(replace(frame, code=after.strip()) if is_code else frame)
        elif failed is not None and frames:
            frames[-1] = replace(frames[-1], line=failed["line"], code=failed["code"].strip(" │"))
        elif marks is not None and before[:1] == " " and frames and frames[-1].code == before.strip():
            operator = before[slice(*marks.span("operator"))].strip()
            call = before[slice(*marks.span("call"))].strip()
            frames[-1] = replace(frames[-1], failed=call if operator[:1] == "(" else operator)
        defined = _DEFINITION.match(line) or (None if frame is not None else defined)
        before = line
    return tuple(frames)


def _unfolded(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, joining the two lines over which rich folds a long path."""
    given = iter(lines)
    for line in given:
        boxed = _BOXED_PATH.match(line)
        if boxed is None or read_frame(line) is not None:
            yield line
        else:
            gap = " " if ":" in boxed["path"][2:] else ""
            yield f"│ {boxed['path']}{gap}{next(given, '').lstrip('│ ')}"


def read_frame(line: str) -> Frame | None:
    """Return the frame that a line of Python, IPython, rich or pytest names, or None if it names none."""
    found = next(filter(None, (form.search(line) for form in _FRAMES)), None)
    if found is None:
        return None
    named = found.groupdict()
    function = (named.get("function") or "<module>").partition("(")[0].strip().rpartition(".")[2]
    return Frame(named["file"], named.get("line") or "", function)
