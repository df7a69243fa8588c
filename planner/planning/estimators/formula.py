"""Evaluate the closed formula of the notebook "GPU memory usage for deep learning image processing".

    training  = D + W + O b + W (d + m) + (O b + D)
    inference = D + W + O b

D is the batch, W the parameters, O the outputs of the layers, b one half under mixed precision, d two under
DistributedDataParallel, m the optimizer's moments; b and d are taken as 1. The notebook's text omits b at the
last O of both lines, but its code does not; the code made the published figures and is followed here. The
formula's errors are kept; docs/formulas.md lists them. All terms are affine in the batch size, so that the
largest batch needs no search.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

FLOAT_BYTES = 4  # the notebook takes every number for a float32, integer inputs included

# Layers that the notebook assumes to work in place.
MEMORYLESS = frozenset(
    {
        *("ReLU", "LeakyReLU", "Sigmoid", "Tanh", "ELU", "GLU", "PReLU", "GELU", "Mish"),
        *("Softmin", "Softmax", "Softmax2d"),
        *("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"),
        *("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "LayerNorm"),
    }
)
# torchinfo shows PyTorch's attention as one layer with a child that never runs: its output counts five times.
ATTENTION = "MultiheadAttention"
ATTENTION_OUTPUTS = 5

# The number of tensors of the weights' size that an optimizer keeps. The notebook names SGD, Adagrad, RMSprop
# and Adam alone.
MOMENTS = {"sgd": 0, "momentum": 1, "nesterov": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}


class Layer(Struct, frozen=True):
    """A row of the layer table: one call of a module."""

    class_name: str
    is_leaf: bool  # whether the module has no children
    output_elements: int
    trainable_parameters: int  # of the module and its children


class LayerTable(Struct, frozen=True):
    """The calls of all modules of a model in one forward pass."""

    batch: int
    input_elements: int  # of the whole batch
    layers: tuple[Layer, ...]


class Counts(Struct, frozen=True):
    """The input elements, output elements and parameters that the formula counts at one batch size."""

    input_elements: int
    output_elements: int
    parameters: int


class AffineCounts(Struct, frozen=True):
    """The numbers of elements and parameters that the formula uses, as affine functions of the batch size."""

    input_elements_per_sample: int
    output_elements_per_sample: int
    fixed_output_elements: int
    parameters: int

    def at(self, batch: int) -> Counts:
        """Return the counts at a batch size."""
        return Counts(
            input_elements=self.input_elements_per_sample * batch,
            output_elements=self.fixed_output_elements + self.output_elements_per_sample * batch,
            parameters=self.parameters,
        )


class Usage(Struct, frozen=True):
    """The formula's terms and totals in bytes: the seven lines that the notebook prints."""

    data_bytes: int
    weight_bytes: int
    forward_output_bytes: int
    weight_gradient_bytes: int  # with the optimizer's moments
    output_gradient_bytes: int  # with the gradient of the batch

    @property
    def training_bytes(self) -> int:
        """Return the formula's total for training: the sum of all terms."""
        return self.inference_bytes + self.weight_gradient_bytes + self.output_gradient_bytes

    @property
    def inference_bytes(self) -> int:
        """Return the formula's total for inference: the batch, the weights and the outputs."""
        return self.data_bytes + self.weight_bytes + self.forward_output_bytes


def count_layers(table: LayerTable) -> Counts:
    """Count the input elements, output elements and parameters of a layer table as the notebook does.

    The rules are of the second version of the notebook's code. Only leaves and attention layers count, and
    in-place leaves count without outputs.
    """
    outputs = parameters = 0
    for layer in table.layers:
        if not layer.is_leaf and layer.class_name != ATTENTION:
            continue
        parameters += layer.trainable_parameters
        if not layer.is_leaf:
            outputs += ATTENTION_OUTPUTS * layer.output_elements
        elif layer.class_name not in MEMORYLESS:
            outputs += layer.output_elements
    return Counts(table.input_elements, outputs, parameters)


def fit_counts(tables: Sequence[LayerTable]) -> AffineCounts:
    """Fit counts for any batch size to layer tables at two or more batch sizes.

    Raises ValueError if the counts are not affine with whole coefficients.
    """
    first, second = tables[:2]
    low, high = count_layers(first), count_layers(second)
    per_sample = (high.output_elements - low.output_elements) // (second.batch - first.batch)
    counts = AffineCounts(
        input_elements_per_sample=first.input_elements // first.batch,
        output_elements_per_sample=per_sample,
        fixed_output_elements=low.output_elements - per_sample * first.batch,
        parameters=low.parameters,
    )
    for table in tables:
        if counts.at(table.batch) != count_layers(table):
            raise ValueError(f"the layers at batch {table.batch} do not continue those at {first.batch}")
    return counts


def usage(counts: Counts, moments: int = 0) -> Usage:
    """Return the formula's terms in bytes; `moments` is the number m of the optimizer's moments."""
    data_bytes = counts.input_elements * FLOAT_BYTES
    weight_bytes = counts.parameters * FLOAT_BYTES
    output_bytes = counts.output_elements * FLOAT_BYTES
    return Usage(
        data_bytes=data_bytes,
        weight_bytes=weight_bytes,
        forward_output_bytes=output_bytes,
        weight_gradient_bytes=weight_bytes * (1 + moments),
        output_gradient_bytes=output_bytes + data_bytes,
    )


def largest_batch(affine_bytes: Callable[[int], int], budget_bytes: int) -> int:
    """Return the largest batch within the budget, or 0 if a batch of 1 takes more.

    `affine_bytes` is an affine function of the batch. Raises ValueError if it does not grow.
    """
    fixed_bytes = affine_bytes(0)
    per_sample_bytes = affine_bytes(1) - fixed_bytes
    if per_sample_bytes < 1:
        raise ValueError("nothing grows with the batch size, so no batch is the largest")
    return max(0, (budget_bytes - fixed_bytes) // per_sample_bytes)
