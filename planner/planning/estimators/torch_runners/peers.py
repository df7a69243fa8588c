"""Compute the totals of other memory estimators: torchinfo, MemTracker, torchsummary, pytorch_modelsize.

torchsummary and pytorch_modelsize are abandoned. Their arithmetic is repeated in this module as their
published figures show it, including its flaws, which docs/formulas.md lists.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from planner.capture import build_model, empty_batch
from planner.errors import ModelError
from planner.jobs import Job, kind_text
from planner.planning.estimators.formula import FLOAT_BYTES
from planner.planning.estimators.methods import Method
from planner.planning.estimators.peers import (
    MEBIBYTE_BYTES,
    MEGABYTE_BYTES,
    Build,
    PeerEstimate,
    sum_of_layers,
)
from planner.planning.estimators.torch_runners.layer_table import error_line, summarize


def _run_memtracker(job: Job, batch: int, build: Build = build_model) -> PeerEstimate:
    """Return the peak of the job's steps under MemTracker, by tensor category.

    The module that runs MemTracker takes more than a second to import, so it is imported on the first call.
    """
    from planner.planning.estimators.torch_runners.mem_tracker import estimate_by_memtracker

    return estimate_by_memtracker(job, batch, build)


def estimate_by_torchinfo(job: Job, batch: int, build: Build = build_model) -> PeerEstimate:
    """Return the three parts of torchinfo's "Estimated Total Size" of a model.

    The size is the sum of input, parameters and twice the outputs. Only the outputs of leaf modules with
    parameters count. The input size includes the few bytes of Python's own storage objects. Raises as `build`
    does, and ModelError if the model does not run.
    """
    statistics = summarize(build(job), job, batch)
    return sum_of_layers(
        input_bytes=statistics.total_input,
        output_bytes=statistics.total_output_bytes,
        parameter_bytes=statistics.total_param_bytes,
        unit_bytes=MEGABYTE_BYTES,
    )


def estimate_by_torchsummary(job: Job, batch: int, build: Build = build_model) -> PeerEstimate:
    """Return the three parts of torchsummary 1.5.1's "Estimated Total Size" of a model.

    The size is the sum of input, parameters and twice the modules' outputs. The model itself, `nn.Sequential`
    and `nn.ModuleList` do not count. torchsummary runs two samples and replaces the first dimension of every
    output by the batch size. Raises as `build` does, and ModelError if torchsummary itself fails.
    """
    model = build(job)
    outputs: list[int] = []
    parameters: list[int] = []

    def hook(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if not (args and isinstance(args[0], Tensor) and isinstance(output, Tensor) and output.dim()):
            raise ModelError(
                f"{job.model.name}: torchsummary knows single tensors only, and {kind_text(module)} "
                "takes or gives something else; use --method trace"
            )
        outputs.append(batch * prod(output.shape[1:]))
        own = (getattr(module, "weight", None), getattr(module, "bias", None))
        parameters.append(sum(tensor.numel() for tensor in own if isinstance(tensor, Tensor)))

    def is_counted(module: nn.Module) -> bool:
        return module is not model and not isinstance(module, nn.Sequential | nn.ModuleList)

    args, kwargs, _ = empty_batch(job, 2, "meta")
    hooks = [module.register_forward_hook(hook) for module in model.modules() if is_counted(module)]
    try:
        with _failing_as(job, "torchsummary"):
            model(*args, **kwargs)
    finally:
        for handle in hooks:
            handle.remove()
    return sum_of_layers(
        input_bytes=batch * prod(prod(spec.shape) for spec in job.samples.inputs) * FLOAT_BYTES,
        output_bytes=2 * sum(outputs) * FLOAT_BYTES,
        parameter_bytes=sum(parameters) * FLOAT_BYTES,
        unit_bytes=MEBIBYTE_BYTES,
    )


def estimate_by_modelsize(job: Job, batch: int, build: Build = build_model) -> PeerEstimate:
    """Return the three parts of pytorch_modelsize's total for a chain of modules.

    The total is the sum of input, parameters and twice the outputs of all modules. Each module runs on the
    output of the module before. Only the parameters of the last module count, as in pytorch_modelsize's
    published figures. Raises as `build` does, and ModelError if the modules do not chain.
    """
    model = build(job)
    chain = list(model.named_modules())[1:]
    args, kwargs, _ = empty_batch(job, batch, "meta")
    if not chain or kwargs or len(args) != 1:
        raise ModelError(
            f"{job.model.name}: pytorch_modelsize needs one input and modules in a chain; use --method trace"
        )
    (flowing,) = args
    outputs = []
    for name, module in chain:
        with _failing_as(job, f"pytorch_modelsize runs {name} on the output of the module before it and"):
            flowing = module(flowing)
            outputs.append(flowing.numel())
    return sum_of_layers(
        input_bytes=args[0].numel() * FLOAT_BYTES,
        output_bytes=2 * sum(outputs) * FLOAT_BYTES,
        parameter_bytes=sum(parameter.numel() for parameter in chain[-1][1].parameters()) * FLOAT_BYTES,
        unit_bytes=MEBIBYTE_BYTES,
    )


# The functions of the estimators, by the method that `--method` names.
PEERS: Mapping[Method, Callable[[Job, int, Build], PeerEstimate]] = {
    Method.TORCHINFO: estimate_by_torchinfo,
    Method.TORCHSUMMARY: estimate_by_torchsummary,
    Method.MODELSIZE: estimate_by_modelsize,
    Method.MEMTRACKER: _run_memtracker,
}


@contextmanager
def _failing_as(job: Job, who: str) -> Iterator[None]:
    """Disable gradients inside the context, and convert errors to ModelErrors on `who`.

    A ModelError is raised unchanged.
    """
    try:
        with torch.no_grad():
            yield
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"{job.model.name}: {who} fails: {error_line(error)}; use --method trace") from error
