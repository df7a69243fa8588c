"""The functions of planner: they give what the commands print, and refuse what would mean nothing."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import planner
from planner.errors import UsageError
from planner.jobs import Loss, TensorSpec
from tests.helpers.command_line import Capture, outcome, without_seconds
from tests.helpers.structs import replace


def test_python_gives_the_json(capsys: Capture, toy_trace: Path) -> None:
    """The functions give what the commands print."""
    _, out, _ = outcome(f"max-batch --trace {toy_trace} --gpu-mib 8000 --json", capsys)
    result = planner.max_batch(trace=toy_trace, gpu_mib=8000)
    assert without_seconds(json.loads(json.dumps(result.to_dict()))) == without_seconds(json.loads(out))
    assert (result.max_batch, result.comfortable_batch) == (json.loads(out)["max_batch"],) * 2
    _, out, _ = outcome(f"estimate --trace {toy_trace} --batch 9 --json", capsys)
    estimated = planner.estimate(trace=toy_trace, batch=9)
    assert without_seconds(json.loads(json.dumps(estimated.to_dict()))) == without_seconds(json.loads(out))
    assert estimated.fits == "yes"


def test_python_prints_the_report(capsys: Capture, toy_trace: Path) -> None:
    """Printed, a result is the report of the command."""
    _, out, _ = outcome(f"estimate --trace {toy_trace}", capsys)
    assert str(planner.estimate(trace=toy_trace)).splitlines()[:-1] == out.splitlines()[:-1]


def test_python_takes_a_factory() -> None:
    """A module factory is traced like any model and gives the job its name."""
    from torch import nn

    def tiny() -> nn.Module:
        return nn.Linear(1024, 1024)

    result = planner.estimate(tiny, 256, input="1024", loss="sum", optimizer="adam", steps=2).to_dict()
    assert (result["model"], result["batch"]) == ("tiny", 256)
    assert result["breakdown_mib"]["parameters"] == 4.004
    assert result["breakdown_mib"]["optimizer"] > 8


def test_python_takes_a_class_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class whose module has no file, as in a notebook, is planned like any other."""
    from torch import nn

    names: dict[str, Any] = {"nn": nn, "__name__": "__main__"}
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    exec("class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(1024, 1024)\n", names)
    result = planner.estimate(names["Net"], 256, input="1024", loss="sum", optimizer="adam", steps=2)
    assert result.to_dict()["breakdown_mib"]["parameters"] == 4.004


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"optimiser": "adam"},
            "there is no option 'optimiser'; the nearest: optimizer, optimizer_arg, optimizer_impl",
        ),
        ({"zzz": 3}, "there is no option 'zzz'"),
        ({"input": (3, 8, 8)}, "tensor 3: write one sample as a text, such as '3x224x224' or '128:int64'"),
        ({"target": 5}, "tensor 5: write one sample as a text, such as '3x224x224' or '128:int64'"),
        ({"gpu": 4090}, "--gpu: 4090 is an int; give a name, or a Device"),
        ({"gpu": None, "gpu_mib": "24000"}, "--gpu-mib: '24000' is a str; give a whole number"),
        ({"confidence": "0.9"}, "--confidence: '0.9' is a str; give a number"),
        ({"alloc_conf": 5}, "--alloc-conf: 5 is an int; give a string"),
        ({"steps": "3"}, "--steps: '3' is a string; use a whole number from 1 to 100"),
    ],
)
def test_python_refuses_what_would_mean_nothing(options: dict[str, Any], message: str) -> None:
    """A misspelled option, or a shape that is no text, is refused and not ignored."""
    for call in (planner.estimate, planner.max_batch, planner.gpus, planner.explain, planner.advise):
        batch = {} if call is planner.max_batch else {"batch": 2}
        card = {} if call is planner.gpus else {"gpu": "L4"}
        if call is planner.gpus and {"gpu", "gpu_mib"} & options.keys():
            continue  # it takes neither
        with pytest.raises(UsageError) as caught:
            call("torchvision:alexnet", **batch, **{**card, **options})
        assert str(caught.value) == message


def test_python_takes_a_module() -> None:
    """A module is planned as the function that returns it; other objects are refused."""
    from torch import nn

    module = nn.Linear(2, 2)
    given = planner.estimate(module, 2, input="2", loss="sum").to_dict()
    made = planner.estimate(lambda: nn.Linear(2, 2), 2, input="2", loss="sum").to_dict()
    assert given["model"] == "Linear"
    assert given["breakdown_mib"] == made["breakdown_mib"]
    assert not module.weight.is_meta
    for other, kind in ((5, "an int"), ([module], "a list")):
        with pytest.raises(UsageError, match=f"^{kind} is no model; give a name, a job, or what makes"):
            planner.estimate(other, 2, input="2")  # type: ignore[call-overload]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_plan_of_training_has_gradients(mode: str) -> None:
    """Inside of `no_grad` and `inference_mode` too, which are open again afterwards."""
    import torch

    with getattr(torch, mode)():
        planner.estimate(lambda: torch.nn.Linear(2, 2), 2, input="2", loss="sum")
        assert torch.is_inference_mode_enabled() is (mode == "inference_mode")
        assert not torch.is_grad_enabled()


def test_a_handled_interrupt_is_not_raised_again() -> None:
    """A plan that fails while its caller handles Ctrl-C says why the plan fails."""

    def broken() -> object:
        raise ValueError("no weights")

    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(planner.errors.ModelError, match="no weights"):
            planner.estimate(broken, 2, input="2", loss="sum")


def test_an_outcome_is_a_condition() -> None:
    """`if result.fits` holds for a batch that fits; sizes may be numpy's."""
    import numpy as np
    from torch import nn

    options: Any = {"input": "1024", "loss": "sum", "gpu_mib": 2000}
    outcomes = [
        planner.estimate(lambda: nn.Linear(1024, 1024), np.int64(n), **options).fits for n in (2, 10**6)
    ]
    assert [(str(one), bool(one)) for one in outcomes] == [("yes", True), ("no", False)]


def test_one_argument_of_a_constructor_needs_no_list() -> None:
    """A single value is taken like a list of one, as for other options of several values."""
    options = {"input": "3x64x64", "target": "scalar:int64", "steps": 1}
    one, several = (
        planner.estimate("torchvision:alexnet", 2, model_arg=given, **options).estimate.job
        for given in ("num_classes=7", ["num_classes=7"])
    )
    assert one == several


def test_python_takes_jobs_and_devices(toy_trace: Path) -> None:
    """A `Job` and a `Device` may be given as objects, with options over the job."""
    from planner.hardware.device import generic_device

    card: planner.Device = replace(generic_device(2000), name="mine")
    job = planner.Job.create("pair", source="zoo:ConvPair", inputs=(TensorSpec((1, 32, 32)),), loss=Loss.SUM)
    result = planner.max_batch(job, gpu=card, optimizer="adam").to_dict()
    assert (result["device"]["name"], result["model"]) == ("mine", "pair")
    assert result["job"]["optimizer"] == "adam"
    assert result["max_batch"] > 0


@pytest.mark.parametrize(
    ("factory", "line"),
    [
        (lambda: 3, "<lambda>: gives an int, not an nn.Module; name a callable that returns one"),
        (
            lambda: 1 // 0,
            "<lambda>: its constructor fails: ZeroDivisionError: integer division or modulo by zero; "
            "check --model-arg, or see the traceback with --debug",
        ),
    ],
)
def test_factory_that_makes_no_model(factory: Callable[[], object], line: str) -> None:
    """A factory that fails or returns something else is a model that cannot be built."""
    from planner.errors import ModelError

    with pytest.raises(ModelError) as caught:
        planner.estimate(factory, 2, input="4", loss="sum")
    assert str(caught.value) == line


def test_unknown_name() -> None:
    """The package has its public names and no other."""
    assert sorted(planner.__all__) == [
        "AdviceResult",
        "CheckResult",
        "ClusterResult",
        "Device",
        "DiagnoseResult",
        "DoesNotFitError",
        "EstimateResult",
        "ExplainResult",
        "GpusResult",
        "Guard",
        "Job",
        "MaxBatchResult",
        "MaxSizeResult",
        "ServeResult",
        "VaryingResult",
        "advise",
        "advise_cluster",
        "check",
        "clusters",
        "diagnose",
        "estimate",
        "explain",
        "gpus",
        "guard",
        "max_batch",
        "max_size",
        "serve",
        "watch",
    ]
    assert all(getattr(planner, name) is not None for name in planner.__all__)
    with pytest.raises(AttributeError, match="module 'planner' has no attribute 'nothing'"):
        planner.nothing  # noqa: B018
