"""The seeds' other estimators: their published figures to the last digit, and where they refuse."""

import sys

import pytest
import torch
from torch import Tensor, nn

from planner.errors import ModelError
from planner.jobs import TensorSpec
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.estimators.peers import PeerEstimate, sum_of_layers
from planner.planning.estimators.torch_runners.peers import (
    PEERS,
    estimate_by_modelsize,
    estimate_by_torchinfo,
    estimate_by_torchsummary,
)
from tests.helpers.models import job_of, on_meta

MIB = 2**20
CATALOGUE = load_catalogue()
# What Python's object behind the storage of one input adds to torchinfo's input size.
STORAGE_OBJECT_BYTES = sys.getsizeof(torch.empty(0, device="meta").untyped_storage())


def in_units(estimate: PeerEstimate) -> float:
    """The total as the tool prints it, before rounding."""
    return estimate.total_bytes / estimate.unit_bytes


def test_total_is_in_the_tools_own_unit() -> None:
    """A size has fewer units of 2**20 than of 10**6."""
    assert in_units(sum_of_layers(1, 2, 2**20 - 3, unit_bytes=2**20)) == 1
    assert in_units(sum_of_layers(1, 2, 10**6 - 3, unit_bytes=10**6)) == 1


def test_torchinfo_adds_up_what_the_notebook_says() -> None:
    """Input, twice the outputs of the convolution and the linear layer, and weights, in units of 10**6."""
    outputs = 128 * 8 * 222 * 222 + 128 * 10
    assert estimate_by_torchinfo(CATALOGUE["cnn"].job, 128) == sum_of_layers(
        input_bytes=128 * 3 * 224 * 224 * 4 + STORAGE_OBJECT_BYTES,
        output_bytes=2 * outputs * 4,
        parameter_bytes=985_914 * 4,
        unit_bytes=10**6,
    )


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("cnn", "484.76"),
        ("vgg16_bn", "28368.03"),
        ("resnet50", "22932.63"),
        ("vit_b_16", "13629.25"),
        ("unetr", "3349.48"),
        ("davenet_audio", "1066.30"),
        ("davenet_image", "14232.99"),
    ],
)
def test_torchinfo_total_stays_what_it_is(name: str, printed: str) -> None:
    """torchinfo 1.8.0 prints this for the seeds' models; no figure of the seeds, but the one we show."""
    total = in_units(estimate_by_torchinfo(CATALOGUE[name].job, CATALOGUE[name].batch))
    assert f"{total:.2f}" == printed


def test_torchsummary_on_davenets_audio_branch_is_the_notebooks() -> None:
    """Input 0.16, forward/backward 10.31 and parameters 60.90 MB at batch 1, and 1,400.90 MB at batch 128."""
    job = CATALOGUE["davenet_audio"].job
    parts = [size for _, size in estimate_by_torchsummary(job, 1).parts]
    assert [f"{part / MIB:.2f}" for part in parts] == ["0.16", "10.31", "60.90"]
    assert f"{in_units(estimate_by_torchsummary(job, 128)):.2f}" == "1400.90"


def test_torchsummary_on_davenets_image_branch_is_the_notebooks() -> None:
    """28,273.64 MB at batch 128."""
    total = in_units(estimate_by_torchsummary(CATALOGUE["davenet_image"].job, 128))
    assert f"{total:.2f}" == "28273.64"


class Shared(nn.Module):
    """A leaf called twice, a module between, containers, and a first dimension that is not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = nn.ModuleList([nn.Sequential(Turned())])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[0](self.linear(self.linear(x)))  # type: ignore[no-any-return]


class Turned(nn.Module):
    """[batch, 4] to [4, batch, 3], through a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x[:, None]).permute(2, 0, 1)  # type: ignore[no-any-return]


def test_torchsummary_counts_as_its_hooks_do() -> None:
    """Each call counts, with weights and biases; the model itself and containers do not.

    It runs two samples and takes the first dimension for the batch: [4, 2, 3] counts 6 elements a sample.
    """
    assert estimate_by_torchsummary(job_of("4"), 10, on_meta(Shared)) == sum_of_layers(
        input_bytes=10 * 4 * 4,
        output_bytes=2 * 10 * (4 + 4 + 3 * 4 + 2 * 3) * 4,
        parameter_bytes=(20 + 20 + 6) * 4,
        unit_bytes=MIB,
    )


def test_torchsummary_multiplies_the_inputs() -> None:
    """Several inputs count, as published, as the product of all their sizes."""
    job = job_of("4").replace(inputs=(TensorSpec((4,)), TensorSpec((4,))))
    assert estimate_by_torchsummary(job, 1, on_meta(Multiply)).parts[0][1] == 4 * 4 * 4


class Multiply(nn.Module):
    """Multiplies its inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


def test_torchsummary_leaves_no_hooks() -> None:
    """A model that the caller keeps has no hooks afterwards, also where it fails."""
    model = nn.Sequential(nn.Linear(4, 4)).to("meta")
    estimate_by_torchsummary(job_of("4"), 1, lambda _: model)
    with pytest.raises(ModelError):
        estimate_by_torchsummary(job_of("5"), 1, lambda _: model)
    assert not model[0]._forward_hooks


def test_modelsize_on_its_example_is_the_articles() -> None:
    """0.5694580078125 MB and 4,776,960 bits, of which input 32,768, parameters 148,480, outputs 4,595,712."""
    estimate = estimate_by_modelsize(CATALOGUE["conv_pair"].job, 1)
    assert in_units(estimate) == 0.5694580078125
    bits = [8 * size for _, size in estimate.parts]
    assert (bits, 8 * estimate.total_bytes) == ([32_768, 4_595_712, 148_480], 4_776_960)


def test_modelsize_on_its_example_is_the_readmes() -> None:
    """408.2833251953125 MB and 3,424,928,768 bits for 16 inputs of 256 x 256, as in the tool's README."""
    job = CATALOGUE["conv_pair"].job.replace(inputs=(TensorSpec((1, 256, 256)),))
    estimate = estimate_by_modelsize(job, 16)
    assert (in_units(estimate), 8 * estimate.total_bytes) == (408.2833251953125, 3_424_928_768)


SINGLE_TENSORS = "torchsummary knows single tensors only, and a {} takes or gives something else"


@pytest.mark.parametrize(
    ("peer", "name", "problem"),
    [
        ("torchsummary", "vit_b_16", SINGLE_TENSORS.format("MultiheadAttention")),
        ("torchsummary", "unetr", SINGLE_TENSORS.format("ViT")),
        (
            "modelsize",
            "davenet_audio",
            "pytorch_modelsize runs batchnorm1 on the output of the module before it and fails: ValueError: "
            "expected 4D input (got 3D input)",
        ),
        ("modelsize", "tensor_1gib", "pytorch_modelsize needs one input and modules in a chain"),
    ],
)
def test_what_a_tool_cannot_count_is_an_error(peer: str, name: str, problem: str) -> None:
    """A tool that fails gives no made-up figure but a line with the reason."""
    with pytest.raises(ModelError) as error:
        PEERS[peer](CATALOGUE[name].job, CATALOGUE[name].batch)
    assert str(error.value) == f"{name}: {problem}; use --method trace"


def test_modelsize_wants_one_positional_input() -> None:
    """A keyword is refused, as the tool passes the tensor to the first module by position."""
    job = job_of("x=1x32x32")
    with pytest.raises(ModelError, match="pytorch_modelsize needs one input and modules in a chain"):
        estimate_by_modelsize(job, 1, on_meta(Shared))
