"""Collect the shape, the dtype and the source line of recorded blocks.

The line is of the model's code. Collecting takes time, since Python's stack is walked for each operator. In
the backward pass no line of the model is on the stack, but a line of the model made the running autograd
node. Nodes are numbered in the order in which they are made, so that the number of a node gives the line.
"""

import linecache
import os
import sys
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

import torch
from torch import Tensor

from planner.program import TensorProvenance

_MOST_CODE = 100  # characters of a source line
_OWN = str(Path(__file__).resolve().parents[2]) + os.sep  # the planner
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep  # with the separator, excludes torchvision
_STOP = str(
    Path(__file__).resolve().parents[1] / "session.py"
)  # the entry of a capture; frames further out are its caller's


@dataclass(frozen=True, slots=True)
class _Line:
    source: str
    code: str


_NO_LINE = _Line("", "")


@dataclass(slots=True)
class ProvenanceCollector:
    """A collector of the shape, dtype and source line of each block in one trace. A recorder calls it."""

    _lines: dict[int, _Line] = field(default_factory=dict)  # by block
    _tensors: dict[int, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    _skipped: dict[CodeType, str] = field(default_factory=dict)  # code object -> "skip", "stop" or ""
    _known: dict[tuple[str, int], _Line] = field(default_factory=dict)
    # At each operator of a forward pass: the number of the next autograd node, and the line that runs.
    _numbers: list[int] = field(default_factory=list)
    _made_by: list[_Line] = field(default_factory=list)
    _running: _Line = _NO_LINE

    def on_operator(self) -> None:
        """Note the line of code that calls the next operator.

        In the backward pass it is the line that made the running autograd node.
        """
        line = self._line_on_stack()
        number = torch._C._autograd._get_sequence_nr()
        if line is not _NO_LINE:
            if not self._numbers or number > self._numbers[-1]:
                self._numbers.append(number)
                self._made_by.append(line)
        else:
            node = torch._C._current_autograd_node()
            if node is not None:
                line = self._line_behind(node._sequence_nr())
        self._running = line

    def on_alloc(self, block: int) -> None:
        """Note that the running operator's line of code allocates a block."""
        self._lines[block] = self._running

    def on_tensor(self, block: int, tensor: Tensor) -> None:
        """Note the shape and dtype of the tensor that a block holds."""
        self._tensors[block] = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def provenance_of(self, blocks: list[int]) -> tuple[TensorProvenance, ...]:
        """Return the provenance of blocks, without blocks of unknown provenance."""
        rows = []
        for block in blocks:
            line = self._lines.get(block, _NO_LINE)
            shape, dtype = self._tensors.get(block, ((), ""))
            if dtype or line.source:
                rows.append(TensorProvenance(block, shape, dtype, line.source, line.code))
        return tuple(rows)

    def _line_behind(self, sequence_number: int) -> _Line:
        """Return the line that made an autograd node, or `_NO_LINE` if unknown.

        This is the line of the first operator that runs after the node was numbered.
        """
        place = bisect_left(self._numbers, sequence_number + 1)
        return self._made_by[place] if place < len(self._numbers) else _NO_LINE

    def _line_on_stack(self) -> _Line:
        """Return the innermost line of user code on the stack, or `_NO_LINE` if there is none.

        User code is outside torch and the planner.
        """
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            kind = self._skipped.get(code)
            if kind is None:
                kind = self._skipped[code] = _kind_of(code.co_filename)
            if kind == "stop":
                break
            if not kind:
                return self._line_at(code.co_filename, frame.f_lineno)
            frame = frame.f_back  # type: ignore[assignment]
        return _NO_LINE

    def _line_at(self, filename: str, number: int) -> _Line:
        line = self._known.get((filename, number))
        if line is None:
            code = linecache.getline(filename, number).strip()[:_MOST_CODE]
            line = self._known[filename, number] = _Line(f"{short_path(filename)}:{number}", code)
        return line


def _kind_of(filename: str) -> str:
    path = str(Path(filename).resolve()) if not filename.startswith("<") else filename
    if path == _STOP:
        return "stop"
    return "skip" if path.startswith((_OWN, _TORCH, "<")) else ""


def short_path(filename: str) -> str:
    """Return a path relative to the innermost folder of `sys.path` that contains it, or the file's name.

    If no folder contains the path, the name alone is returned. The working directory counts as a folder of
    `sys.path`.
    """
    path = Path(filename).resolve()
    roots = [Path(entry).resolve() for entry in sys.path if entry] + [Path.cwd()]
    inside = [root for root in roots if path.is_relative_to(root)]
    return path.relative_to(max(inside, key=lambda root: len(root.parts))).as_posix() if inside else path.name
