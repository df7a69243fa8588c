"""Build the layer table of a job with torchinfo on the meta device.

No GPU, weights or data are needed.
"""

from math import prod
from typing import Any

from torch import nn
from torchinfo import summary

from planner.capture import build_model, empty_batch
from planner.errors import ModelError
from planner.jobs import Job
from planner.planning.estimators.formula import (
    AffineCounts,
    Counts,
    Layer,
    LayerTable,
    count_layers,
    fit_counts,
)
from planner.planning.estimators.peers import Build

FIT_BATCHES = (2, 3, 7)  # the first two determine a line, the third confirms it


def formula_counts(job: Job, batch: int, build: Build = build_model) -> Counts:
    """Return the elements and parameters that the closed formula counts at a batch size.

    Raises as `build` and `layer_table` do.
    """
    return count_layers(layer_table(build(job), job, batch))


def affine_formula_counts(job: Job, build: Build = build_model) -> AffineCounts:
    """Return the elements and parameters that the closed formula counts, affine in the batch size.

    Raises as `build` and `layer_table` do, and ModelError if the outputs are not affine in the batch size.
    """
    model = build(job)
    tables = [layer_table(model, job, batch) for batch in FIT_BATCHES]
    try:
        return fit_counts(tables)
    except ValueError as error:
        raise ModelError(
            f"{job.model.name}: the formula has no inverse: {error}; use --method trace"
        ) from error


def layer_table(model: nn.Module, job: Job, batch: int) -> LayerTable:
    """Return torchinfo's list of the module calls in a forward pass.

    The model is in eval mode, and its parameters are on the meta device. Raises ModelError if the model does
    not run.
    """
    rows = summarize(model, job, batch).summary_list
    layers = tuple(
        Layer(row.class_name, row.is_leaf_layer, prod(row.output_size), row.trainable_params) for row in rows
    )
    return LayerTable(batch, batch * sum(prod(spec.shape) for spec in job.samples.inputs), layers)


def summarize(model: nn.Module, job: Job, batch: int) -> Any:
    """Run torchinfo on a model with its default options, and return its `ModelStatistics`.

    Raises ModelError if the model does not run.
    """
    args, kwargs, _ = empty_batch(job, batch, "meta")
    # torchinfo would take a model's keyword such as `depth` for one of its own options.
    hook = model.register_forward_pre_hook(lambda _, args, __: (args, kwargs), with_kwargs=True)
    try:
        return summary(model, input_data=list(args) if args else kwargs, device="meta", verbose=0)
    except (Exception, SystemExit) as error:
        # torchinfo wraps the model's error in a list of the layers that ran.
        problem = f"torchinfo fails: {error_line(error.__cause__ or error)}"
        raise ModelError(f"{job.model.name}: {problem}; check --input, or use --method trace") from error
    finally:
        hook.remove()


def error_line(error: BaseException) -> str:
    """Return an error's type name and the first line of its message, cut to 120 characters."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first if len(first) <= 120 else first[:117] + '...'}"
