"""nnU-Net's plans: patches, targets of every scale, the trainer's recipe, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.capture.models.nnunet.build import planned_patches
from planner.capture.models.registry import build_model
from planner.capture.session import record
from planner.errors import ModelError, UsageError
from planner.jobs import ClipGradients, Job, Loss, Optimizer, Precision, resolve_job
from planner.planning.programs import complete_from_library
from planner.program.events import Alloc
from tests.helpers.nnunet import nnunet_library

ARCHITECTURE = {
    "network_class_name": "dynamic_network_architectures.net.Net",
    "arch_kwargs": {"strides": [[1, 1], [2, 2], [2, 2]], "conv_op": "torch.nn.modules.conv.Conv2d"},
    "_kw_requires_import": ["conv_op"],
}
PLANS: dict[str, Any] = {
    "configurations": {
        "2d": {"patch_size": [32, 48], "batch_size": 4, "batch_dice": True, "architecture": ARCHITECTURE},
        "2d_large": {"inherits_from": "2d", "patch_size": [64, 64]},
        "older": {"patch_size": [32, 32], "UNet_class_name": "PlainConvUNet"},
    }
}


@pytest.fixture
def plans(tmp_path: Path) -> Iterator[Path]:
    """A plans file beside its dataset, and a stand-in of the library of networks."""
    about = {
        "channel_names": {"0": "T1", "1": "T2"},
        "labels": {"background": 0, "a": 1, "b": 2, "ignore": 3},
    }
    (tmp_path / "dataset.json").write_text(json.dumps(about))
    path = tmp_path / "nnUNetPlans.json"
    path.write_text(json.dumps(PLANS))
    with nnunet_library(tmp_path):
        yield path


def nnunet_job(path: Path, options: Any = (), **arguments: Any) -> Job:
    """The whole job of a configuration."""
    job = resolve_job(f"nnunet:{path}", {}, model_args=list(arguments.items()), **dict(options))
    return complete_from_library(job)


def test_inputs_are_those_of_the_plans(plans: Path) -> None:
    """A patch with the channels of the dataset, and its segmentation at each scale but the smallest."""
    job = nnunet_job(plans, configuration="2d")
    assert [str(spec) for spec in job.samples.inputs] == [
        "data=2x32x48",
        "target[0]=1x32x48:int16",
        "target[1]=1x16x24:int16",
    ]
    large = nnunet_job(plans, configuration="2d_large")
    assert str(large.samples.inputs[0]) == "data=2x64x64"
    other = nnunet_job(plans, configuration="2d", patch_size=(16, 16), input_channels=1)
    assert str(other.samples.inputs[0]) == "data=1x16x16"
    assert len(nnunet_job(plans, {"mode": "infer"}, configuration="2d").samples.inputs) == 1


def test_the_recipe_is_the_trainers(plans: Path) -> None:
    """nnUNetTrainer uses Nesterov's momentum, float16 with a gradient scaler, and clips the norm."""
    job = nnunet_job(plans, configuration="2d")
    recipe = (
        job.loop.loss,
        job.loop.optimizer,
        job.loop.precision,
        job.loop.grad_scaler,
        job.loop.clip_gradients,
    )
    assert recipe == (Loss.OUTPUT, Optimizer.NESTEROV, Precision.AMP_FP16, True, ClipGradients.NORM)


def test_classes_leave_out_what_is_ignored(plans: Path) -> None:
    """Background and two labels make three classes; the truth is spread over them, a byte each."""
    job = nnunet_job(plans, configuration="2d")
    model = build_model(job)
    assert [tuple(one.shape) for one in model.parameters()][0] == (3, 2, 3, 3)
    trace = record(job, 4, (8, 6))
    sizes = [
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc) and trace.sites[event.site].op == "aten.zeros.default"
    ]
    assert 4 * 3 * 32 * 48 in sizes


def test_what_cannot_be_planned_is_refused(plans: Path) -> None:
    """Unknown configurations, plans of older versions, other inputs, and classes from elsewhere."""
    with pytest.raises(UsageError, match="has none of this name; it has 2d"):
        nnunet_job(plans, configuration="2dd")
    with pytest.raises(ModelError, match="names no architecture, as plans of nnU-Net before 2.4"):
        nnunet_job(plans, configuration="older")
    with pytest.raises(UsageError, match="compiles its network without the loss, which is not planned"):
        nnunet_job(plans, {"compile": "default"}, configuration="2d")
    with pytest.raises(UsageError, match="plans take configuration"):
        nnunet_job(plans, width=3)
    code = {"configurations": {"2d": {"patch_size": [8, 8], "architecture": {**ARCHITECTURE}}}}
    code["configurations"]["2d"]["architecture"]["network_class_name"] = "os.system"
    plans.write_text(json.dumps(code))
    with pytest.raises(ModelError, match="code from elsewhere is not run"):
        build_model(nnunet_job(plans, configuration="2d"))


def test_another_patch_may_have_the_network_of_the_planner(plans: Path) -> None:
    """With `replan`, a patch is padded to what its strides divide, and deeper where it is larger."""
    values = json.loads(plans.read_text())
    own = values["configurations"]["2d"]
    own |= {"spacing": [1.0, 1.0], "median_image_size_in_voxels": [64.0, 48.0]}
    own["architecture"]["arch_kwargs"] |= {"features_per_stage": [8, 16], "kernel_sizes": []}
    own["architecture"]["network_class_name"] = "dynamic_network_architectures.net.Stages"
    plans.write_text(json.dumps(values))
    job = nnunet_job(plans, configuration="2d", patch_size=(50, 34), replan=True)
    assert [str(spec) for spec in job.samples.inputs] == [
        "data=2x56x40",
        "target[0]=1x56x40:int16",
        "target[1]=1x28x20:int16",
        "target[2]=1x14x10:int16",
    ]
    assert len([one for one in build_model(job).parameters() if one.shape[2:] == (3, 3)]) == 4
    assert planned_patches(job)[-1] == (64, 48)


def test_plans_that_tell_no_spacing_are_not_planned_anew(plans: Path) -> None:
    """An answer names what the planner went by where it is missing."""
    with pytest.raises(ModelError, match="the configuration has no spacing, which decides the network"):
        nnunet_job(plans, configuration="2d", replan=True)
