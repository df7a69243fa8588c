"""Split the weights of a model's layers over ranks, by the model's plan in transformers."""

from typing import Any

import torch
from torch import nn

from planner.errors import UsageError
from planner.jobs import Job


def split_tensors(model: Any, job: Job, mesh: Any) -> str:
    """Split a model's weights over ranks in place, and return a note for the trace.

    The split is as by `from_pretrained(tp_plan="auto")`. Raises UsageError if the model has no plan, or if
    its weights cannot be divided as the plan requires.
    """
    where = f"{job.model.name}: --tp {job.sharding.tp}"
    if not getattr(model, "tp_plan", None):
        raise UsageError(
            f"{where}: the model has no tensor parallel plan (`tp_plan`) in transformers; "
            "call parallelize_module in a file of your own"
        )
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    try:
        _untie(model)
        plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=job.sharding.tp))
        apply_tensor_parallelism(model, mesh, plan)
        model.tie_weights()
    except ValueError as error:
        raise UsageError(f"{where}: transformers refuses: {error}") from error
    return f"tensor parallel: by the plan of transformers ({', '.join(dict.fromkeys(plan.values()))})"


def _untie(model: Any) -> None:
    """Replace tied parameters by separate parameters, as transformers does while it loads a model.

    transformers does it by `no_tie_weights`.
    """
    for name in model.all_tied_weights_keys:
        module, _, parameter = name.rpartition(".")
        parted = nn.Parameter(torch.empty_like(model.get_parameter(name)))
        setattr(model.get_submodule(module), parameter, parted)
