"""Find the number of a model's blocks.

Captures with fewer blocks can then stand for the whole model.
"""

import re
from typing import Any

from torch import nn

from planner.capture.models.registry import construct_model, find_constructor, import_transformers
from planner.capture.models.transformers import build as hf
from planner.errors import ModelError
from planner.jobs import Depth, Job, argument_texts, split_model

_PLAIN = (bool, int, float, str, tuple, list, type(None))  # types of attributes that may tell blocks apart


def find_depth(job: Job, least: int) -> Depth | None:
    """Return the number of equal blocks of a transformers model, and the argument that sets it, or None.

    The first and the last block may differ from the others. None is returned for fewer than `least` blocks,
    for a model that cannot be built, and if an option of the job may name single blocks. The model is built
    on the meta device. Raises UsageError for an unknown model.
    """
    source, name = split_model(job.model.origin)
    if source != hf.SOURCE or _may_name_blocks(job):
        return None
    found = hf.depth_argument(import_transformers(), name, dict(job.model.args))
    if found is None or found[1] < least:
        return None
    try:
        model = construct_model(job, find_constructor(job))
    except ModelError:
        return None  # the capture raises it
    depth = Depth(*found)
    return depth if _has_equal_blocks(model, depth.blocks) else None


def _may_name_blocks(job: Job) -> bool:
    """Return whether an option of the job may depend on the number of blocks.

    Such an option selects single blocks by number, or is DeepSpeed.
    """
    patterns = (*job.model.freeze, *job.model.train_only)
    pairs = argument_texts((*job.model.peft_arg, *job.model.quantize_arg))
    pairs += argument_texts(job.sharding.fsdp_arg)
    return bool(
        job.sharding.deepspeed
        or any(re.search(r"[\d?\[]", pattern) for pattern in patterns)
        or any(re.search(r"layers_|_pattern=|[A-Za-z_]\.\d", pair) for pair in pairs)
    )


def _has_equal_blocks(model: nn.Module, count: int) -> bool:
    """Return whether all blocks of a model are equal, except the first and the last block.

    Blocks are in lists of `count` modules. False if the model has no list of `count` modules.
    """
    lists = [
        [*module.children()]
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) == count
    ]
    return bool(lists) and all(len({_structure(block) for block in blocks[1:-1]}) == 1 for blocks in lists)


def _structure(block: nn.Module) -> tuple[Any, ...]:
    """Return a block's module types, parameter shapes and plain attributes, by which blocks are compared.

    Private attributes, and attributes that number a block, are left out.
    """
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, tuple(each.shape), each.dtype) for key, each in module.named_parameters(recurse=False)
            ),
            tuple(
                (key, repr(value))
                for key, value in sorted(vars(module).items())
                if isinstance(value, _PLAIN) and not re.search("^_|idx|index|_id$|number", key)
            ),
        )
        for name, module in block.named_modules()
    )
