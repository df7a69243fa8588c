"""Why a trace failed, in one line: the module, operator and source line, what went wrong and what to do."""

import re
import traceback
from pathlib import Path

import torch

from planner.capture.process_state import message_of
from planner.capture.recorder.recorder import Recorder
from planner.capture.values.interpreter import DataDependentError
from planner.errors import ModelError
from planner.jobs import Job

MOST_LETTERS = 200  # of what an exception says
SHAPES = "check --input and --target"
ANY = "see the traceback with --debug"

# Operators whose result, or the shape of it, depends on values that a trace on meta does not have.
_READS_VALUES = re.compile(
    r"_local_scalar_dense|nonzero|nms|unique|masked_select|\.equal|is_nonzero|bincount|repeat_interleave"
)
# So torch speaks where values of a meta tensor are asked for.
_IS_ABOUT_META = re.compile(r"meta tensor|on meta|'?meta'? (backend|device)|meta kernel|device=?'?meta", re.I)
_IS_ABOUT_SHAPES = re.compile(
    r"shape|\bsizes?\b|dimension|\bdims?\b|dtype|data type|scalar type|expand|broadcast|reduction dim"
    r"|channels|must match|multiplied|number of elements|out of range|out of bounds|contiguous|\b[1-5]D\b"
    r"|\b(same|length)"
    r"|forward\(\) (missing|got|takes)|unexpected keyword|too many values|not enough values",
    re.I,
)
# What is not planned: torch's words, what it is, and what can be done.
_NOT_PLANNED = (
    (
        r"SparseTensorImpl|[sS]parse(Meta|CPU|CUDA)|layout.*Sparse",
        "sparse tensors and sparse gradients are not planned",
        "use dense ones, such as sparse=False",
    ),
    (r"NestedTensor", "nested tensors are not planned", "use padded ones"),
    (
        r"not compiled with CUDA|NVIDIA driver|ATen_cuda|arguments from the 'CUDA' backend",
        "it asks for a GPU in a way that a trace does not follow",
        "write device=x.device with a tensor of the batch",
    ),
    (
        r"(same|two|different) devices?\b.*\bmeta\b|\bmeta\b.*(same|two|different) device",
        "a tensor of the CPU meets one of the GPU, which fails on a GPU too",
        "make it with device=x.device, or register it as a buffer",
    ),
)


def explain(job: Job, batch: int, recorder: Recorder, error: BaseException) -> ModelError:
    """Return the error that a user sees: DataDependentError where shapes alone do not do."""
    place, running, line = recorder.place(), recorder.running or "", source_line(error)
    op = f" in {running}" if running else ""
    where = f"{job.model}: {place} fails at batch {batch}{op}{line}"
    said = " ".join(message_of(error).split()) or type(error).__name__
    if _is_of_flex_attention(error):
        return ModelError(
            f"{where}: flex_attention is not planned, since a compiler makes its kernels; "
            "plan with torch.nn.functional.scaled_dot_product_attention in its place"
        )
    for words, reason, remedy in _NOT_PLANNED:
        if re.search(words, said):
            return ModelError(f"{where}: {reason}; {remedy}")
    if wants_values(said, running):
        return DataDependentError(job.model, f"{place} calls {running or 'code'}{line}")
    if isinstance(error, SystemExit):
        said = f"it ends the process with code {error.code}"
    said = said if len(said) <= MOST_LETTERS else said[: MOST_LETTERS - 3] + "..."
    return ModelError(f"{where}: {said}; {remedy_for(error, said)}")


def wants_values(said: str, running: str = "") -> bool:
    """Whether an exception comes of values that a trace on meta does not have."""
    return bool(_READS_VALUES.search(running) or "nonzero" in said or _IS_ABOUT_META.search(said))


def remedy_for(error: BaseException, said: str, otherwise: str = ANY) -> str:
    """What can be done about an exception."""
    if isinstance(error, ImportError):
        name = (error.name or "").partition(".")[0]
        return f"install {name or 'it'}, or leave that import away for the plan"
    if isinstance(error, RuntimeError | ValueError | TypeError | IndexError) and _IS_ABOUT_SHAPES.search(
        said
    ):
        return SHAPES
    return otherwise


def source_line(error: BaseException) -> str:
    """The innermost line that is neither torch's nor the planner's; of torchvision, those of models count."""
    own = str(Path(__file__).resolve().parent)
    theirs = str(Path(torch.__file__).resolve().parent)  # also the beginning of torchvision's
    models = str(Path("torchvision", "models"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if models in frame.filename or not frame.filename.startswith((own, theirs, "<")):
            return f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return ""


def _is_of_flex_attention(error: BaseException) -> bool:
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    return any(Path(file).name == "flex_attention.py" and "torch" in Path(file).parts for file in files)
