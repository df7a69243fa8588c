"""The layer table through torchinfo: the notebook's estimates of its models, and what a table leaves out."""

import sys

import pytest
import torch
from torch import Tensor, nn

from planner.errors import ModelError
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.estimators.formula import (
    Counts,
    Layer,
    LayerTable,
    Usage,
    largest_batch,
    usage,
)
from planner.planning.estimators.torch_runners.layer_table import (
    affine_formula_counts,
    formula_counts,
    layer_table,
)
from tests.helpers.models import job_of, on_meta

MIB = 2**20


def usage_of(name: str) -> Usage:
    """The formula for a catalogue entry at its own batch size, under SGD."""
    entry = load_catalogue()[name]
    return usage(formula_counts(entry.job, entry.batch))


def test_cnn_through_torchinfo_is_the_notebooks() -> None:
    """The seven lines that the notebook prints for its CNN, its layers counted through torchinfo."""
    terms = usage_of("cnn")
    lines = (
        *(terms.data_bytes, terms.weight_bytes, terms.forward_output_bytes),
        *(terms.weight_gradient_bytes, terms.output_gradient_bytes),
        *(terms.training_bytes, terms.inference_bytes),
    )
    assert [f"{line / MIB:.1f}" for line in lines] == [
        *("73.5", "3.8", "240.6", "3.8", "314.1", "635.8", "317.9")
    ]


# `estimated` is the notebook's results table, of torch 2.0.1 and a MONAI of 2023; no count has moved since.
@pytest.mark.parametrize(
    ("name", "training_bytes", "estimated"),
    [
        ("cnn", 666_706_384, "636"),
        ("vgg16_bn", 16_702_466_640, "15929"),
        ("resnet50", 11_930_716_752, "11378"),
        ("vit_b_16", 19_584_778_320, "18678"),
        ("unetr", 5_876_868_880, "5605"),
    ],
)
def test_training_total_is_the_notebooks(name: str, training_bytes: int, estimated: str) -> None:
    """The total for training, to the last digit of the notebook's results table."""
    total = usage_of(name).training_bytes
    assert (total, f"{total / MIB:.0f}") == (training_bytes, estimated)


def test_variable_is_its_own_data() -> None:
    """The table's 1024 MiB for the variable are the formula's term for data, not one of its totals."""
    assert usage_of("tensor_1gib").data_bytes == 1024 * MIB


WITH_INPUTS = [name for name, entry in load_catalogue().items() if entry.job.samples.inputs]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_INPUTS)
def test_every_catalogue_model_is_affine_in_the_batch(name: str) -> None:
    """Counts from small batches give those of the entry's own batch, and the inverse returns that batch."""
    entry = load_catalogue()[name]
    counts = affine_formula_counts(entry.job)
    assert counts.at(entry.batch) == formula_counts(entry.job, entry.batch)
    budget_bytes = usage(counts.at(entry.batch)).training_bytes
    assert largest_batch(lambda batch: usage(counts.at(batch)).training_bytes, budget_bytes) == entry.batch


class Everything(nn.Module):
    """A shared activation, attention, and a parameter outside any leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(5, 4))
        self.linear = nn.Linear(4, 4)
        self.sigmoid = nn.Sigmoid()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.frozen = nn.Linear(4, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sigmoid(self.linear(x + self.position))
        x = self.sigmoid(self.linear(x))
        x, _ = self.attention(x, x, x)
        return self.frozen(x)  # type: ignore[no-any-return]


def test_table_has_a_row_for_each_call() -> None:
    """Rows in order of the calls; a layer called twice occurs twice, with its parameters each time."""
    with torch.device("meta"):
        model = Everything()
    assert layer_table(model, job_of("5x4"), 3) == LayerTable(
        batch=3,
        input_elements=60,
        layers=(
            Layer("Everything", False, 90, 120),
            Layer("Linear", True, 60, 20),
            Layer("Sigmoid", True, 60, 0),
            Layer("Linear", True, 60, 20),
            Layer("Sigmoid", True, 60, 0),
            Layer("MultiheadAttention", False, 60, 80),
            Layer("Linear", True, 90, 0),
        ),
    )


def test_what_the_formula_overlooks_stays_overlooked() -> None:
    """Called twice, weights count twice; frozen weights and those outside leaves do not count."""
    counts = formula_counts(job_of("5x4"), 3, on_meta(Everything))
    assert counts == Counts(input_elements=60, output_elements=60 + 60 + 5 * 60 + 90, parameters=20 + 20 + 80)


def test_vision_transformers_positions_are_overlooked() -> None:
    """ViT-B/16 counts, as in the notebook, without its class token and positions, which no leaf holds."""
    counts = formula_counts(load_catalogue()["vit_b_16"].job, 1)
    assert counts.parameters == 86_567_656 - 990 * 769 - 768 - 197 * 768


def test_model_keeps_its_mode() -> None:
    """torchinfo runs the model in eval mode and puts it back."""
    model = nn.Sequential(nn.Linear(4, 4))
    layer_table(model.to("meta"), job_of("4"), 2)
    assert model.training


class TwoInputs(nn.Module):
    """Multiplies its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, depth: Tensor) -> Tensor:
        return self.linear(x * depth)  # type: ignore[no-any-return]


class OnlyKeyword(nn.Module):
    """Takes its input by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *, mode: Tensor) -> Tensor:
        return self.linear(mode)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "inputs", "counted"),
    [(OnlyKeyword, ["mode=4"], Counts(8, 8, 20)), (TwoInputs, ["4", "depth=4"], Counts(16, 8, 20))],
)
def test_keyword_inputs_reach_the_model(make: type[nn.Module], inputs: list[str], counted: Counts) -> None:
    """Inputs may have keywords, also those that torchinfo's own options are called by."""
    assert formula_counts(job_of(*inputs), 2, on_meta(make)) == counted


class Squares(nn.Module):
    """A layer on all pairs of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, None] * x[None, :])  # type: ignore[no-any-return]


def test_outputs_that_grow_faster_than_the_batch_are_refused() -> None:
    """A model that pairs samples has a formula at each batch size, but no inverse."""
    job = job_of("4")
    assert formula_counts(job, 3, on_meta(Squares)).output_elements == 36
    with pytest.raises(ModelError) as error:
        affine_formula_counts(job, on_meta(Squares))
    assert str(error.value) == (
        "test: the formula has no inverse: the layers at batch 7 do not continue those at 2; "
        "use --method trace"
    )


class Fails(nn.Module):
    """Raises an error of two lines, or ends the process."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            sys.exit(3)
        raise ValueError("a first line\nand another")


@pytest.mark.parametrize(
    ("batch", "problem"), [(2, "ValueError: a first line"), (1, "SystemExit: 3")], ids=["raises", "exits"]
)
def test_model_that_does_not_run_is_one_line(batch: int, problem: str) -> None:
    """The model's own error is shown, not torchinfo's list of the layers that ran."""
    with pytest.raises(ModelError) as error:
        formula_counts(job_of("5"), batch, on_meta(Fails))
    expected = f"test: torchinfo fails: {problem}; check --input, or use --method trace"
    assert str(error.value) == expected
