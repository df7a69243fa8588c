"""Explain a failed capture in one line: module, operator and source line, the problem and its remedy."""

import re
import traceback
from pathlib import Path

import torch

from planner.capture.process_state import is_launched, message_of
from planner.capture.recorder.recorder import Recorder
from planner.capture.values.interpreter import DataDependentError
from planner.errors import ModelError
from planner.jobs import Job

MOST_LETTERS = 200  # of an exception's message
SHAPES = "check --input and --target"
ANY = "see the traceback with --debug"

# Operators whose result, or its shape, depends on values that tensors on meta lack.
_READS_VALUES = re.compile(
    r"_local_scalar_dense|nonzero|nms|unique|masked_select|\.equal|is_nonzero|bincount|repeat_interleave"
)
# torch's messages where values of a meta tensor are read.
_IS_ABOUT_META = re.compile(r"meta tensor|on meta|'?meta'? (backend|device)|meta kernel|device=?'?meta", re.I)
_IS_ABOUT_SHAPES = re.compile(
    r"shape|\bsizes?\b|dimension|\bdims?\b|dtype|data type|scalar type|expand|broadcast|reduction dim"
    r"|channels|must match|multiplied|number of elements|out of range|out of bounds|contiguous|\b[1-5]D\b"
    r"|\b(same|length)"
    r"|forward\(\) (missing|got|takes)|unexpected keyword|too many values|not enough values",
    re.I,
)
# What a process lacks that torchrun has not started: its environment, and a process group.
_IS_ABOUT_RANKS = re.compile(
    r"KeyError\('(LOCAL_)?(RANK|WORLD_SIZE)'\)|env:// rendezvous|[Pp]rocess group has not been initialized"
    r"|only works in distributed training"
)
_IS_ABOUT_CLASSES = re.compile(r"Expected dtype int32/int64 for index, but got torch\.float")
# Unsupported constructs: torch's words, the problem and the remedy.
_NOT_PLANNED = (
    (
        r"SparseTensorImpl|[sS]parse(Meta|CPU|CUDA)|layout.*Sparse",
        "sparse tensors and sparse gradients are not planned",
        "use dense ones, such as sparse=False",
    ),
    (r"NestedTensor", "nested tensors are not planned", "use padded ones"),
    (
        r"not compiled with CUDA|NVIDIA driver|ATen_cuda|arguments from the 'CUDA' backend",
        "it queries the GPU in a way that a trace does not follow",
        "write device=x.device with a tensor of the batch",
    ),
    (
        r"(same|two|different) devices?\b.*\bmeta\b|\bmeta\b.*(same|two|different) device"
        r"|expected device meta",
        "tensors of CPU and GPU meet, which fails on a GPU too",
        "make it with device=x.device, or register it as a buffer",
    ),
)


def explain(job: Job, batch: int, recorder: Recorder, error: BaseException) -> ModelError:
    """Return the error that a user sees: DataDependentError where shapes alone do not do."""
    place, running, line = recorder.place(), recorder.running or "", source_line(error)
    op = f" in {running}" if running else ""
    where = f"{job.model}: {place} fails at batch {batch}{op}{line}"
    message = " ".join(message_of(error).split()) or type(error).__name__
    if _is_of_flex_attention(error):
        return ModelError(
            f"{where}: flex_attention is not planned, since a compiler makes its kernels; "
            "plan with torch.nn.functional.scaled_dot_product_attention in its place"
        )
    for words, reason, remedy in _NOT_PLANNED:
        if re.search(words, message):
            return ModelError(f"{where}: {reason}; {remedy}")
    if reads_values(message, running):
        return DataDependentError(job.model, f"{place} calls {running or 'code'}{line}")
    if isinstance(error, SystemExit):
        message = f"it ends the process with code {error.code}"
    message = message if len(message) <= MOST_LETTERS else message[: MOST_LETTERS - 3] + "..."
    return ModelError(f"{where}: {message}; {remedy_for(error, message)}")


def reads_values(message: str, running: str = "") -> bool:
    """Return whether an exception comes from values that tensors on meta lack."""
    return bool(_READS_VALUES.search(running) or "nonzero" in message or _IS_ABOUT_META.search(message))


def remedy_for(error: BaseException, message: str, otherwise: str = ANY) -> str:
    """Return the remedy of an exception."""
    if isinstance(error, ImportError):
        name = (error.name or "").partition(".")[0]
        return f"install {name or 'it'}, or remove that import for the plan"
    if isinstance(error, SystemExit) and _is_of_file(error, "argparse.py"):
        return (
            "it needs arguments of its own, and a plan gives none: give them defaults, or parse them below "
            'if __name__ == "__main__":'
        )
    if not is_launched() and _IS_ABOUT_RANKS.search(f"{error!r} {message}"):
        return "it is one rank of several: give their number, such as --world-size 2"
    if isinstance(error, AssertionError) and "capturable=True" in str(error):
        return "its optimizer steps before the first step, which is not planned: move that into the step"
    if _IS_ABOUT_CLASSES.search(message):
        return f"{SHAPES}; classes are int64, such as --target scalar:int64"
    if isinstance(error, RuntimeError | ValueError | TypeError | IndexError) and _IS_ABOUT_SHAPES.search(
        message
    ):
        return SHAPES
    return otherwise


def source_line(error: BaseException) -> str:
    """Return the innermost line outside torch, torchvision and the planner; torchvision's models count."""
    files = [Path(__file__), Path(torch.__file__)]  # torch's folder is also the beginning of torchvision's
    theirs = tuple(str(file.parent) for path in files for file in (path, path.resolve()))
    models = str(Path("torchvision", "models"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if models in frame.filename or not frame.filename.startswith((*theirs, "<")):
            return f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return ""


def _is_of_flex_attention(error: BaseException) -> bool:
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    return any(Path(file).name == "flex_attention.py" and "torch" in Path(file).parts for file in files)


def _is_of_file(error: BaseException, name: str) -> bool:
    return any(Path(frame.filename).name == name for frame in traceback.extract_tb(error.__traceback__))
