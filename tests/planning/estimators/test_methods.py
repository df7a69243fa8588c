"""Options that a method takes."""

import pytest

from planner.errors import UsageError
from planner.planning.estimators.methods import Method, find_method, reject_unsupported_options


def test_trace_is_the_default_method() -> None:
    """The method without a name is the planner's own trace."""
    assert (find_method(None), find_method("modelsize")) == (Method.TRACE, Method.MODELSIZE)


def test_unknown_method_is_refused_with_the_known_ones() -> None:
    """A name that is none, or none of those usable here, lists what is usable."""
    with pytest.raises(UsageError) as caught:
        find_method("torchinfo", (Method.TRACE, Method.FORMULA))
    assert str(caught.value) == "--method torchinfo: unknown here; use one of trace, formula"


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (Method.FORMULA, {"optimizer": "adam", "mode": "infer", "gpu": "l4", "confidence": 0.5}),
        (Method.MEMTRACKER, {"optimizer_impl": "fused", "loss": "sum", "steps": 1, "keep_grads": True}),
        (Method.TORCHINFO, {"input": ["3x4"], "steps": None, "keep_grads": False, "model_arg": ["a=1"]}),
        (Method.TRACE, {"trace": "x", "alloc_conf": "y"}),
    ],
)
def test_options_that_a_method_honours_pass(method: Method, options: dict[str, object]) -> None:
    """Options that a method takes account of, and options that are not given, are no problem."""
    reject_unsupported_options(method, options)


@pytest.mark.parametrize(
    ("method", "option", "line"),
    [
        (Method.FORMULA, "zero_grad", "--zero-grad and --method formula: the closed formula"),
        (Method.FORMULA, "trace", "--trace and --method formula: the closed formula"),
        (
            Method.FORMULA,
            "an_option_of_tomorrow",
            "--an-option-of-tomorrow and --method formula: the closed formula",
        ),
        (Method.TORCHINFO, "optimizer", "--optimizer and --method torchinfo: torchinfo"),
        (Method.TORCHSUMMARY, "mode", "--mode and --method torchsummary: torchsummary"),
        (Method.MODELSIZE, "loss", "--loss and --method modelsize: pytorch_modelsize"),
        (Method.MEMTRACKER, "alloc_conf", "--alloc-conf and --method memtracker: MemTracker"),
    ],
)
def test_option_that_means_nothing_to_a_method_is_refused(method: Method, option: str, line: str) -> None:
    """An option without effect is never ignored, unlisted options included."""
    with pytest.raises(UsageError) as caught:
        reject_unsupported_options(method, {"input": ["3x4"], option: "x"})
    assert str(caught.value) == f"{line} takes no account of it; remove it, or use --method trace"
