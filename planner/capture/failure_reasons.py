"""Explain a failed capture in one line.

The line tells where the exception was raised, its message, and a hint. A hint is given only if its cause is
established: by the type of the exception, by the code that raised it, and by a message that torch uses for
that cause alone. A word in a message from the model's code establishes nothing.
"""

import argparse
import os
import re
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from planner.capture.meta_kernels.positions import PositionError
from planner.capture.process_state import is_launched, message_of
from planner.capture.recorder.recorder import Recorder
from planner.capture.values.interpreter import DataDependentError
from planner.errors import ModelError
from planner.jobs import Job
from planner.program import Phase

MOST_LETTERS = 200  # most letters of an exception's message that are shown
SHAPES = "check --input and --target"
_COMPUTED_AGAIN = (
    "a checkpointed block that is computed again finds what its first run kept: let it keep nothing, such as "
    "by --model-arg use_cache=false"
)
ANY = "see the traceback with --debug"
_HERE = str(Path(__file__).parents[1])
_OF_OS = (os.__file__, "<frozen os>")
_TORCH = str(Path(torch.__file__).parent) + os.sep

# Operators whose result, or the result's shape, depends on values, which meta tensors lack.
_READS_VALUES = re.compile(
    r"_local_scalar_dense|nonzero|nms|unique|masked_select|\.equal|is_nonzero|bincount|repeat_interleave"
)
# torch's messages when values of a meta tensor are read.
_IS_ABOUT_META = re.compile(
    r"meta tensor|on meta|'?meta'? (backend|device)|meta kernel|device=?'?meta|nonzero", re.I
)
# torch's messages about operands with mismatched shapes or types.
_IS_ABOUT_SHAPES = re.compile(
    r"shapes? cannot be multiplied|same reduction dim|is invalid for input of size"
    r"|size of tensor a|izes of tensors must match"
    r"|to have \d+ channels|ernel size can't be greater|expected (scalar type|m1 and m2|.*dtype)"
    r"|must have the same dtype|(must be|xpected|[Gg]ot) .*\d-?D\b|\d-?D .*([Ee]xpected|input)"
    r"|[Dd]imension|output with shape|must match the (size|shape|existing)|size mismatch|[Ii]nput size"
    r"|input batch_size|target size|(same|more than 1) (number of )?(values?|elements?)|shape mismatch"
    r"|expected .*(dims?|shape|sizes?|channels)|index out of range|out of bounds|normalized_shape"
    r"|too small|multiplied|broadcast|equal (size|to)|must be (divisible|[a-z]+ing point)"
    r"|result type .* can't be cast|data type",
)
_LACKS_A_KERNEL = "not implemented for '"  # followed by a dtype
_IS_A_CALL = re.compile(
    r"\(\) (missing|got|takes) .*(argument|keyword)"  # about the model itself if no line of its code calls
)
_IS_OF_INDICES = re.compile(
    r"Expected dtype int32/int64 for index, but got torch\.float"
    r"|'indices' to have one of the following scalar"
)
# Sentences that torch appends to its messages: possible causes, lists of backends, advice to report a bug.
_ADDED = re.compile(
    r"\. This could be because.*| Set TORCHDYNAMO_VERBOSE.*| For more details about this.*"
    r"|,? ?please report (a|this) (bug|issue)( to PyTorch)?\.?|\(please [^)]*PyTorch\)",
    re.S,
)
# Unsupported constructs: a pattern of torch's message, the problem and the remedy.
_NOT_PLANNED = (
    (
        r"SparseTensorImpl|Sparse(Csr)?(Meta|CPU|CUDA)|layout.*Sparse",
        "sparse tensors and sparse gradients are not planned",
        "use dense ones (of an embedding by sparse=False); planner run emulates such a script",
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
    """Return a ModelError that explains a failed capture, or a DataDependentError if the model reads values.

    A ModelError names the place, the message and a remedy. Unsupported constructs always give a ModelError.
    """
    place, running, line = recorder.place(), recorder.running or "", source_line(error)
    op = f" in {running}" if running else ""
    when = ""
    if recorder.phase is Phase.EVALUATION:
        when, batch = "in the evaluation, ", job.loop.eval_batch or batch
    where = f"{job.model.name}: {when}{place} fails at batch {batch}{op}{line}"
    sentence = sentence_of(error)
    compiled = getattr(error, "inner_exception", None)  # of torch._dynamo.exc.BackendCompilerFailed
    if isinstance(compiled, BaseException):
        failure = f"torch.compile fails: {sentence_of(compiled)}"
        return ModelError(f"{where}: {failure}; plan without --compile, or {ANY}")
    if _is_of_flex_attention(error):
        return ModelError(
            f"{where}: flex_attention is not planned, since a compiler makes its kernels; "
            "plan with torch.nn.functional.scaled_dot_product_attention in its place"
        )
    if _is_raised_by_torch(error):
        for words, reason, remedy in _NOT_PLANNED:
            if re.search(words, sentence):
                return ModelError(f"{where}: {reason}; {remedy}")
    if reads_values(error, running):
        line = source_line(_read_of_values(error) or error)  # a library may raise an error of its own from it
        return DataDependentError(job.model.name, f"{place} calls {running or 'code'}{line}")
    if isinstance(error, SystemExit):
        sentence = f"it ends the process with code {error.code}"
    remedy = remedy_for(error, running=running)
    if recorder.phase is Phase.EVALUATION and job.loop.eval_input:
        remedy = remedy.replace(SHAPES, "check --eval-input")
    notes = getattr(error, "__notes__", ())
    return ModelError("; ".join((f"{where}: {sentence}", *notes, remedy)))


def sentence_of(error: BaseException) -> str:
    """Return an exception's message as one line of at most `MOST_LETTERS` letters.

    Advice that torch appends is removed. An exception without a message gives the name of its class.
    """
    message = " ".join(_ADDED.sub("", message_of(error)).split()) or type(error).__name__
    called, clash, rest = message.partition(" got multiple values for ")
    if clash and "(" in called and not called.endswith("()"):  # Python names an object by its repr
        message = f"{called.partition('(')[0]}(){clash}{rest}"
    return message if len(message) <= MOST_LETTERS else message[: MOST_LETTERS - 3] + "..."


def reads_values(error: BaseException, running: str = "") -> bool:
    """Return whether an exception's chain or the operator `running` shows a read of meta tensors' values.

    `running` is the operator in which the exception was raised. It shows a read if its result depends on
    values.
    """
    return _READS_VALUES.search(running) is not None or _read_of_values(error) is not None


def _read_of_values(error: BaseException) -> BaseException | None:
    """Return the first exception in the chain of `error` that is about reading values on meta, or None."""
    chain = (one for one in _chain_of(error) if _is_raised_by_torch(one))
    return next((one for one in chain if _IS_ABOUT_META.search(message_of(one))), None)


def remedy_for(error: BaseException, otherwise: str = ANY, running: str | None = None) -> str:
    """Return words on how to remedy an exception, or `otherwise` if its cause is unclear.

    `running` is the operator in which the exception was raised, or "" outside of any operator. `running` is
    None if no batch had been passed yet, so that the shapes of a batch cannot be at fault.
    """
    if isinstance(error, ImportError):
        return _remedy_for_import(error)
    if isinstance(error, SystemExit) and argparse.__file__ in _files_of(error):
        return (
            "it needs arguments of its own, and a plan gives none: give them defaults, or parse them below "
            'if __name__ == "__main__":'
        )
    if not is_launched() and _lacks_ranks(error):
        return "it is one rank of several: give their number, such as --world-size 2"
    if isinstance(error, PositionError):
        return "give shorter samples by --input, or the table more rows, such as by --model-arg"
    if not _is_raised_by_torch(error):
        return otherwise
    message = message_of(error)
    if running is None:
        return otherwise
    if _IS_OF_INDICES.search(message):
        is_of_classes = "nll_loss" in running
        return f"{SHAPES}; " + (
            "classes are int64, such as --target scalar:int64"
            if is_of_classes
            else "indices are int64, such as --input 128:int64"
        )
    if _LACKS_A_KERNEL in message:
        return f"convert its operands, as by .float(), or {SHAPES}"
    is_call = isinstance(error, TypeError) and _IS_A_CALL.search(message) and not source_line(error)
    kinds = (AssertionError, RuntimeError, ValueError, IndexError, TypeError)
    if is_call or (isinstance(error, kinds) and _IS_ABOUT_SHAPES.search(message)):
        return _COMPUTED_AGAIN if _is_computed_again(error) else SHAPES
    return otherwise


def _remedy_for_import(error: ImportError) -> str:
    name = (error.name or "").partition(".")[0]
    try:
        is_there = bool(name) and find_spec(name) is not None
    except (ImportError, ValueError):
        is_there = False
    if is_there:
        return f"install the version of {name} that has it, or remove that import for the plan"
    return f"install {name or 'it'}, or remove that import for the plan"


def _lacks_ranks(error: BaseException) -> bool:
    """Return whether an error is about a missing variable of torchrun or a missing process group."""
    if isinstance(error, KeyError):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        return error.args[:1] in [(name,) for name in names] and _files_of(error)[-1] in _OF_OS
    words = r"env:// rendezvous|process group has not been initialized"
    return _is_raised_by_torch(error) and bool(re.search(words, message_of(error), re.I))


def source_line(error: BaseException) -> str:
    """Return the innermost traceback line outside of torch and `planner.capture`, or "" if there is none.

    Its form is " (file:line: code)". Code of torchvision is skipped too, except its models.
    """
    files = [Path(__file__), Path(torch.__file__)]  # torch's folder is also the beginning of torchvision's
    theirs = tuple(str(file.parent) for path in files for file in (path, path.resolve()))
    models = str(Path("torchvision", "models"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if models in frame.filename or not frame.filename.startswith((*theirs, "<")):
            return f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return ""


def _is_raised_by_torch(error: BaseException) -> bool:
    """Return whether torch, the planner or C code raised an exception, not Python code of a model or library.

    The answer is True if the innermost frame is in the code of torch or the planner, or is at a line that
    does not raise or assert itself and so called into C.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    last = frames[-1]
    if last.filename.startswith((_TORCH, _HERE)):
        return True
    return re.match(r"\s*(raise|assert)\b", last.line or "") is None


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, then each exception behind it: the cause, or the context if there is no cause."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _is_of_flex_attention(error: BaseException) -> bool:
    files = (file for file in _files_of(error) if file.startswith(_TORCH))
    return any(Path(file).name == "flex_attention.py" for file in files)


def _is_computed_again(error: BaseException) -> bool:
    """Return whether an exception was raised while a checkpointed block was recomputed."""
    return any(
        frame.filename.endswith("/torch/utils/checkpoint.py") and frame.name in ("unpack_hook", "backward")
        for frame in traceback.extract_tb(error.__traceback__)
    )


def _files_of(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)] or [""]
