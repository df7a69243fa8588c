"""Tell the cause and the place of a failed request by the functions of a traceback."""

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from planner.planning.diagnosis.diagnosis import Cause, Place
from planner.planning.diagnosis.tracebacks import Frame

_CALL = re.compile(r"([A-Za-z_][\w.]*)\(")
_OPTIMIZER_STATE = ("_init_group", "init_state", "_init_state")
_OF_DEEPSPEED = "initialize_optimizer_states"
_EVALUATES = {"eval", "evaluate", "evaluation", "validation"}
# Words that name an evaluation if only words of its loop are near them: a model's forward pass
# may have functions such as `predict_masks`, and any code may validate its arguments.
_MAY_EVALUATE = {
    "val",
    "valid",
    "validate",
    "test",
    "predict",
    "prediction",
    "inference",
    "infer",
    "generate",
}
_OF_LOOPS = {"run", "do", "on", "one", "step", "loop", "epoch", "batch", "model", "start", "end", "fn"}


def names_evaluation(function: str) -> bool:
    """Return whether a function's name says that it evaluates. An example is `validation_step`."""
    words = set(filter(None, function.lower().split("_")))
    if words & {"train", "training", "fit"}:
        return False
    return bool(words & _EVALUATES or (words & _MAY_EVALUATE and words <= _MAY_EVALUATE | _OF_LOOPS))


def cause_of_frames(frames: Sequence[Frame]) -> tuple[Cause, str] | None:
    """Return the cause and reason that a traceback implies, or None if it implies no cause.

    The names of functions decide.
    """
    outside_of_modules = () if _is_backward(frames) else takewhile(_is_no_module, frames)
    for frame in outside_of_modules:
        if names_evaluation(frame.function):
            return Cause.EVALUATION, (
                f"it happened in {frame.function}, an evaluation: plan it by --evaluate and --eval-batch, "
                "and look for outputs that it keeps on the GPU or a missing torch.no_grad()"
            )
    if any(map(_makes_optimizer_state, frames)):
        return Cause.FIRST_STEP, (
            "the optimizer allocated its state, as it does in its first step: the forward and backward pass "
            "fit without it"
        )
    return None


def _is_backward(frames: Iterable[Frame]) -> bool:
    return any(
        frame.function in ("_engine_run_backward", "backward") and not frame.is_of_user for frame in frames
    )


def _is_no_module(frame: Frame) -> bool:
    return frame.function not in ("forward", "_call_impl", "_wrapped_call_impl")


def _makes_optimizer_state(frame: Frame) -> bool:
    is_in_step = frame.function == "step" and "zeros_like" in frame.code  # of torch before 2.0
    is_named = frame.function in _OPTIMIZER_STATE or is_in_step
    return frame.function == _OF_DEEPSPEED or ("optim" in frame.file and is_named and not frame.is_of_user)


def place_of_frames(frames: Sequence[Frame]) -> Place:
    """Return the innermost line of the user's code, and the function called there.

    The innermost frame's line names the function, or else the user's line; it is "backward" in a backward
    pass. If no frame is of the user's code, the innermost frame counts. The result is empty without frames.
    """
    if not frames:
        return Place()
    own = next((frame for frame in reversed(frames) if frame.is_of_user), frames[-1])
    calls = _CALL.findall(frames[-1].code) or _CALL.findall(own.code)
    if _is_backward(frames):
        calls = ["backward"]
    return Place(f"{own.file}:{own.line}, in {own.function}", calls[0] if calls else "")
