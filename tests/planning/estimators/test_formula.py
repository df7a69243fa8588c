"""The notebook's closed formula: its printed figures, its terms, and its inverse against brute force."""

import pytest
from hypothesis import given, strategies as st

from planner.errors import UsageError
from planner.jobs import Job, Optimizer
from planner.planning.estimators.formula import (
    MEMORYLESS,
    MOMENTS,
    AffineCounts,
    Counts,
    Layer,
    LayerTable,
    Usage,
    count_layers,
    fit_counts,
    largest_batch,
    usage,
)
from planner.planning.estimators.static_estimate import moments_of
from tests.helpers.structs import replace

MIB = 2**20

# As the notebook counts its CNN by hand: a 3x3 convolution to 8 channels, 2x2 pooling, a linear layer.
CNN = AffineCounts(
    input_elements_per_sample=3 * 224 * 224,
    output_elements_per_sample=8 * 222 * 222 + 8 * 111 * 111,
    fixed_output_elements=10,
    parameters=3 * 3 * 3 * 8 + 8 + 8 * 111 * 111 * 10 + 10,
)
SMALL = Counts(input_elements=3, output_elements=100, parameters=1000)


def printed(terms: Usage) -> list[str]:
    """The notebook's seven lines, in MiB."""
    lines = (
        *(terms.data_bytes, terms.weight_bytes, terms.forward_output_bytes),
        *(terms.weight_gradient_bytes, terms.output_gradient_bytes),
        *(terms.training_bytes, terms.inference_bytes),
    )
    return [f"{line / MIB:.1f}" for line in lines]


def test_cnn_by_hand_is_the_notebooks() -> None:
    """The seven lines that the notebook prints for its CNN at batch 128."""
    lines = printed(usage(CNN.at(128)))
    assert lines == ["73.5", "3.8", "240.6", "3.8", "314.1", "635.8", "317.9"]


def test_last_output_by_hand_is_counted_once_for_the_batch() -> None:
    """The ten outputs of the last layer count ten, as published, not ten for each sample."""
    assert CNN.at(128).output_elements == 128 * (8 * 222 * 222 + 8 * 111 * 111) + 10


def test_terms_in_bytes() -> None:
    """Four bytes an element; in training the batch, the weights and the outputs count twice."""
    terms = usage(SMALL)
    assert terms == Usage(
        data_bytes=12,
        weight_bytes=4000,
        forward_output_bytes=400,
        weight_gradient_bytes=4000,
        output_gradient_bytes=412,
    )
    assert (terms.training_bytes, terms.inference_bytes) == (8824, 4412)


@pytest.mark.parametrize(("moments", "weight_gradient_bytes"), [(1, 8000), (2, 12_000)])
def test_moments_multiply_the_weights(moments: int, weight_gradient_bytes: int) -> None:
    """Each moment takes as much as the weights; nothing else changes."""
    changed = replace(usage(SMALL), weight_gradient_bytes=weight_gradient_bytes)
    assert usage(SMALL, moments) == changed


@pytest.mark.parametrize(
    ("layer", "counted"),
    [
        (Layer("Conv2d", True, 50, 7), Counts(3, 50, 7)),
        (Layer("ReLU", True, 50, 0), Counts(3, 0, 0)),
        (Layer("BatchNorm2d", True, 50, 7), Counts(3, 0, 7)),
        (Layer("InstanceNorm3d", True, 50, 7), Counts(3, 50, 7)),
        (Layer("Sequential", False, 50, 7), Counts(3, 0, 0)),
        (Layer("MultiheadAttention", False, 50, 7), Counts(3, 250, 7)),
    ],
)
def test_layer_counts_as_published(layer: Layer, counted: Counts) -> None:
    """Leaves count, activations, dropouts and most norms without outputs; attention's counts five times."""
    assert count_layers(LayerTable(1, 3, (layer,))) == counted


def test_layers_in_place_are_the_notebooks() -> None:
    """The notebook's list has 21 names; instance and group norm and newer activations are not there."""
    assert len(MEMORYLESS) == 21
    assert not MEMORYLESS & {
        "InstanceNorm2d",
        "GroupNorm",
        "SiLU",
        "ReLU6",
        "Hardswish",
        "MaxPool2d",
        "Identity",
    }


def table(batch: int, *output_elements: int, parameters: int = 7) -> LayerTable:
    """Convolutions with these outputs, on two input elements for each sample."""
    layers = tuple(Layer("Conv2d", True, elements, parameters) for elements in output_elements)
    return LayerTable(batch, 2 * batch, layers)


def test_tables_at_several_batch_sizes_hold_at_any() -> None:
    """Tables are added up to fixed and per-sample counts; a layer whose output has no batch stays fixed."""
    counts = fit_counts([table(batch, 10 * batch, 5) for batch in (2, 3, 7)])
    assert counts == AffineCounts(
        input_elements_per_sample=2, output_elements_per_sample=10, fixed_output_elements=5, parameters=14
    )


@pytest.mark.parametrize(
    "tables",
    [
        [table(2, 4), table(3, 9), table(7, 49)],
        [table(2, 20), table(4, 41)],
        [table(2, 20), table(3, 30, parameters=8)],
    ],
    ids=["a square", "half an element a sample", "other parameters"],
)
def test_tables_on_no_line_are_refused(tables: list[LayerTable]) -> None:
    """Counts that no whole number a sample explains are refused, with the batch size that shows it."""
    with pytest.raises(ValueError, match=f"batch {tables[-1].batch} do not continue those at 2"):
        fit_counts(tables)


COUNTS = st.builds(
    AffineCounts,
    input_elements_per_sample=st.integers(1, 9),
    output_elements_per_sample=st.integers(0, 9),
    fixed_output_elements=st.integers(0, 50),
    parameters=st.integers(0, 50),
)


@given(counts=COUNTS, moments=st.integers(0, 2), budget_bytes=st.integers(0, 3000))
def test_largest_batch_is_the_one_that_trying_finds(
    counts: AffineCounts, moments: int, budget_bytes: int
) -> None:
    """The inverse is exact: its batch takes at most the budget, the next one takes more."""

    def terms(batch: int) -> Usage:
        return usage(counts.at(batch), moments)

    tried = [terms(batch) for batch in range(1, 1000)]
    training = sum(one.training_bytes <= budget_bytes for one in tried)
    inference = sum(one.inference_bytes <= budget_bytes for one in tried)
    assert largest_batch(lambda batch: terms(batch).training_bytes, budget_bytes) == training
    assert largest_batch(lambda batch: terms(batch).inference_bytes, budget_bytes) == inference


def test_budget_is_met_to_the_byte() -> None:
    """A budget of exactly what batch 128 takes gives 128, one byte less gives 127."""

    def training_bytes(batch: int) -> int:
        return usage(CNN.at(batch)).training_bytes

    assert largest_batch(training_bytes, training_bytes(128)) == 128
    assert largest_batch(training_bytes, training_bytes(128) - 1) == 127


def test_nothing_that_grows_has_no_largest_batch() -> None:
    """Without inputs and outputs every batch takes the same, and none is the largest."""
    with pytest.raises(ValueError, match="no batch is the largest"):
        largest_batch(lambda batch: 5, 10**9)


def test_moments_are_the_notebooks() -> None:
    """SGD 0, Adagrad and RMSprop 1, Adam 2, and every other optimizer but Adafactor by what it keeps."""
    assert MOMENTS == {
        **{"sgd": 0, "adagrad": 1, "rmsprop": 1, "adam": 2},
        **{"momentum": 1, "nesterov": 1, "adamw": 2},
    }
    assert set(Optimizer) - set(MOMENTS) == {"adafactor"}
    assert moments_of(Job.create("a", optimizer=Optimizer.ADAM)) == 2


def test_adafactor_has_no_moments_to_count() -> None:
    """Adafactor's state is factored, which the formula has no term for; the refusal notes it."""
    with pytest.raises(UsageError) as error:
        moments_of(Job.create("a", optimizer=Optimizer.ADAFACTOR))
    assert str(error.value) == (
        "optimizer adafactor: the formula counts moments the size of the weights, and adafactor keeps "
        "others; use --method trace"
    )
