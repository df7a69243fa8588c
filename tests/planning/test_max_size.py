"""The largest size of samples: its neighbours, several ranges, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import planner
from planner.errors import UsageError
from planner.jobs import Job, parse_tensor_spec
from planner.planning.search.max_size import sizes_between
from tests.helpers.nnunet import nnunet_library

JOB: dict[str, Any] = {"loss": "sum", "optimizer": "sgd", "cudnn": "published"}


def net() -> nn.Module:
    """Convolutions over images of any size."""
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))


def job_of(*inputs: str, pad_to: int = 1) -> Job:
    """A job with these inputs."""
    return Job.create("net", inputs=tuple(map(parse_tensor_spec, inputs)), pad_to=pad_to)


def test_the_answer_fits_and_the_next_does_not() -> None:
    """`estimate` says of both sizes what the search says."""
    result = planner.max_size(net, 4, input="3x64..2048x64..2048", pad_to=32, gpu_mib=1500, **JOB)
    assert result.max_size is not None
    (size,) = result.max_size
    assert size % 32 == 0
    at = {
        each: planner.estimate(net, 4, input=f"3x{each}x{each}", gpu_mib=1500, **JOB)
        for each in (size, size + 32)
    }
    assert at[size].fits != "no"
    assert at[size + 32].fits == "no"
    shown = result.to_dict()
    assert shown["at_max"]["peak_reserved_mib"] == at[size].to_dict()["peak_reserved_mib"]
    assert shown["first_failure"]["fits"] == "no"
    assert f"{size} at batch 4" in str(result)


def test_few_sizes_are_traced() -> None:
    """Memory grows linearly with an image's pixels, so five traces find the largest of 249 sizes."""
    lines: list[str] = []
    job: dict[str, Any] = {"input": "3x64..2048x64..2048", "pad_to": 8, "gpu_mib": 1500, **JOB}
    result = planner.max_size(net, 4, on_progress=lines.append, **job)
    (size,) = result.max_size or (0,)
    traced = [line for line in lines if line.startswith("tracing 3x")]
    assert f"tracing 3x{size}x{size}" in traced
    assert f"tracing 3x{size + 8}x{size + 8}" in traced
    assert len(traced) <= 5


class Padding(nn.Module):
    """A layer that copies rows which are not aligned, and refuses rows of `refused`."""

    def __init__(self, refused: int = 0) -> None:
        super().__init__()
        self.scale, self.refused = nn.Parameter(torch.ones(())), refused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        if self.refused and length % self.refused:
            raise ValueError(f"rows of {length} values")
        padded = nn.functional.pad(x, (0, -length % 8)) if length % 8 else x
        return (padded * self.scale).exp()


@pytest.mark.parametrize("refused", [0, 8])
def test_aligned_sizes_are_searched_first(refused: int) -> None:
    """Aligned rows take less memory, so that the largest is far above where others end, if they are taken."""
    job: dict[str, Any] = {"optimizer": "sgd", "loss": "sum", "allocator_cap_mib": 60}
    result = planner.max_size(lambda: Padding(refused), 1, input="64x1000..80000", **job)
    (size,) = result.max_size or (0,)
    assert (size % 8, result.max_size) == (0, result.comfortable_size)
    fits = {each: planner.estimate(Padding, 1, input=f"64x{each}", **job).fits for each in (size, size + 8)}
    assert fits == {size: "yes", size + 8: "no"}
    if not refused:
        assert planner.estimate(Padding, 1, input=f"64x{size - 1}", **job).fits == "no"
        assert result.plan.failing == (size + 1,)


def test_ranges_of_two_lengths_grow_together() -> None:
    """From 480 x 640 to 960 x 1280 the aspect stays, padded to multiples of 32."""
    sizes = sizes_between(job_of("3x480..960x640..1280", pad_to=32))
    assert (sizes[0], sizes[-1]) == ((480, 640), (960, 1280))
    assert (736, 960) in sizes
    assert all(height % 32 == 0 and width % 32 == 0 for height, width in sizes)
    assert list(sizes) == sorted(set(sizes))


def test_one_range_has_each_multiple() -> None:
    """Lengths 100 to 200, padded to 64, are 128, 192 and 256."""
    assert sizes_between(job_of("100..200:int64", pad_to=64)) == ((128,), (192,), (256,))


def test_where_nothing_fits_or_everything_does() -> None:
    """Not even the smallest size fits a cap of 2 MiB; all do on a large GPU."""
    little: dict[str, Any] = {"input": "3x16..64x16..64", "pad_to": 16, **JOB}
    none = planner.max_size(net, 4, allocator_cap_mib=2, **little)
    assert none.answer_size is None
    assert "not even 16 fits" in str(none)
    every = planner.max_size(net, 4, gpu="H200", **little)
    assert (every.max_size, every.plan.first_failure) == ((64,), None)
    assert "where the search ends" in str(every)


class NeedsSixteen(nn.Module):
    """A network that refuses images below 16 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] < 16:
            raise ValueError(f"images of {x.shape[-1]} pixels are too small")
        return self.net(x)


def test_small_sizes_that_the_model_refuses_are_left_out() -> None:
    """The search begins at the smallest that it takes, and one answer is not told as two."""
    result = planner.max_size(NeedsSixteen, 4, input="3x8..64x8..64", pad_to=8, gpu="H200", **JOB)
    text = str(result)
    assert (result.max_size, result.comfortable_size) == ((64,), (64,))
    assert "Largest size:   64 at batch 4 and confidence 0.99, where the search ends" in text
    assert "With retries" not in text
    assert "sizes are tried from 16 on: " in text


class TakesSome(nn.Module):
    """A network for images of 16 to 48 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not 16 <= x.shape[-1] <= 48:
            raise ValueError(f"images of {x.shape[-1]} pixels are not taken")
        return self.net(x)


@pytest.mark.parametrize("smallest", [8, 16])
def test_large_sizes_that_the_model_refuses_are_left_out(smallest: int) -> None:
    """The search ends at the largest that it takes, which the headline says."""
    images = f"3x{smallest}..64x{smallest}..64"
    result = planner.max_size(TakesSome, 4, input=images, pad_to=8, gpu="H200", **JOB)
    text = str(result)
    assert result.max_size == (48,)
    assert "Largest size:   48 at batch 4 and confidence 0.99, the largest that the model takes" in text
    assert "sizes are tried up to 48: " in text
    assert ("sizes are tried from 16 on: " in text) is (smallest == 8)


class WithContext(nn.Module):
    """Convolutions over an image beside a larger one, whose size is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.net(x).sum() + context.sum()


def test_an_input_of_one_size_does_not_decide_the_search() -> None:
    """Sizes grow in the other input alone, though it has fewer elements."""
    inputs = ["3x8..480x8..480", "3x512x512"]
    result = planner.max_size(WithContext, 4, input=inputs, pad_to=8, allocator_cap_mib=100, **JOB)
    assert result.max_size is not None
    (size,) = result.max_size
    fits = [
        planner.estimate(
            WithContext, 4, input=[f"3x{each}x{each}", "3x512x512"], allocator_cap_mib=100, **JOB
        ).fits
        for each in (size, size + 8)
    ]
    assert (fits[0] != "no", fits[1]) == (True, "no")


def test_what_max_size_does_not_plan_is_refused() -> None:
    """Inputs without a range, and options of runs on samples of many sizes."""
    with pytest.raises(UsageError, match="max-size needs the sizes to search"):
        planner.max_size(net, 4, input="3x64x64", gpu="L4", **JOB)
    with pytest.raises(UsageError, match="--batching: max-size plans batches whose samples all have one"):
        planner.max_size(net, 4, input="3x64..128x64", batching="scaled", gpu="L4", **JOB)
    with pytest.raises(UsageError, match="no batch size is known"):
        planner.max_size(net, input="3x64..128x64", gpu="L4", **JOB)


def test_the_largest_patch_of_plans(plans_of_images: Path) -> None:
    """The patch is one that nnU-Net's planner tries, at batch 2, and the next larger one does not fit."""
    result = planner.max_size(f"nnunet:{plans_of_images}", allocator_cap_mib=14, cudnn="published")
    patches = [tuple(size) for size, _ in result.to_dict()["probes"]]
    assert result.plan.batch == 2
    assert result.max_size in patches
    assert result.plan.at_max is not None
    arguments = dict(result.plan.at_max.job.model.args)
    assert (arguments["patch_size"], arguments["replan"]) == (result.max_size, True)
    assert result.plan.search.first_failure == result.plan.search.largest + 1


@pytest.fixture
def plans_of_images(tmp_path: Path) -> Iterator[Path]:
    """Plans of a U-Net for images of 200 x 160, with a stand-in of the library of networks."""
    arguments = {
        "features_per_stage": [8, 16],
        "strides": [[1, 1], [2, 2]],
        "kernel_sizes": [[3, 3], [3, 3]],
        "n_conv_per_stage": [2, 2],
        "n_conv_per_stage_decoder": [2],
        "conv_op": "torch.nn.modules.conv.Conv2d",
    }
    architecture = {
        "network_class_name": "dynamic_network_architectures.net.Stages",
        "arch_kwargs": arguments,
        "_kw_requires_import": ["conv_op"],
    }
    configuration = {
        "patch_size": [64, 64],
        "spacing": [1.0, 1.0],
        "median_image_size_in_voxels": [200.0, 160.0],
        "architecture": architecture,
    }
    path = tmp_path / "nnUNetPlans.json"
    path.write_text(json.dumps({"configurations": {"3d_fullres": configuration}}))
    with nnunet_library(tmp_path):
        yield path
