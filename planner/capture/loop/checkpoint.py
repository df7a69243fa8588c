"""Checkpoint the repeated blocks of a model (`--checkpoint blocks`).

The blocks run again in the backward pass. A model's own switch for checkpointing is used if there is one;
else `torch.utils.checkpoint` wraps each block. Models that checkpoint by themselves do not need this module.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from planner.errors import ModelError
from planner.jobs import Job

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@contextmanager
def checkpointed_blocks(model: nn.Module, job: Job) -> Iterator[tuple[str, ...]]:
    """Checkpoint the model's repeated blocks inside the context, by the model's own switch if it has one.

    Yields a note that names the blocks or the model's own switch. A model's own switch stays on after the
    context. Raises ModelError if the model has neither a switch nor repeated blocks.
    """
    switch = _use_own_switch(model)
    if switch is not None:
        yield (f"activations are checkpointed as the model's own {switch} does it",)
        return
    blocks = find_blocks(model)
    if not blocks:
        raise ModelError(
            f"{job.model.name}: no blocks to checkpoint: no list of it holds several modules of one class; "
            "use --checkpoint none, or checkpoint inside the model"
        )
    for block in blocks:
        block.forward = _run_again(block.forward)
    try:
        yield (f"activations are checkpointed block by block: {len(blocks)} {name_kinds(blocks)}",)
    finally:
        for block in blocks:
            del block.forward


def _use_own_switch(model: nn.Module) -> str | None:
    """Turn on a model's own gradient checkpointing, and return the switch's name, or None without one.

    The switches are methods of timm, transformers and diffusers. A model that refuses its switch counts as a
    model without a switch: timm asserts, the others raise ValueError.
    """
    without_reentrance = {"use_reentrant": False}  # the default since transformers 5
    for name, *arguments in (
        ("set_grad_checkpointing", True),
        ("activation_checkpointing_enable", without_reentrance),
        ("gradient_checkpointing_enable", without_reentrance),  # the older name of the method above
        ("enable_gradient_checkpointing",),
    ):
        switch = getattr(model, name, None)
        if callable(switch):
            try:
                switch(*arguments)
            except (AssertionError, ValueError):
                continue
            return name
    return None


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return a model's repeated blocks, such as transformer layers, without blocks inside other blocks.

    The blocks have the order of the model's modules. In each list of modules, the blocks are the modules of
    the class that holds most of the parameters, if the list has several of them and they contain modules.
    Plain lists, and classes that are lists of blocks, such as the stages of a ResNet, are searched instead. A
    class of blocks counts as blocks everywhere in the model, unless it occurs inside blocks of another class.
    """
    kinds = {kind for module in model.modules() if isinstance(module, _LISTS) for kind in _repeated(module)}
    for inner in [kind for kind in kinds if _occurs_inside(kind, kinds - {kind}, model)]:
        kinds.discard(inner)
    return list(dict.fromkeys(_outermost(model, kinds)))  # shared blocks once


def name_kinds(modules: Iterable[nn.Module]) -> str:
    """Return the distinct class names of modules, separated by commas and without FSDP's prefix."""
    return ", ".join(dict.fromkeys(type(module).__name__.removeprefix("FSDP") for module in modules))


def _repeated(modules: nn.Module) -> set[type[nn.Module]]:
    """Return a set that holds the class of the repeated blocks in a list of modules, or an empty set."""
    elements: dict[type[nn.Module], int] = {}
    for child in modules.children():
        elements[type(child)] = elements.get(type(child), 0) + sum(p.numel() for p in child.parameters())
    if not elements or not max(elements.values()):
        return set()
    kind = max(elements, key=lambda kind: elements[kind])
    children = [child for child in modules.children() if type(child) is kind]
    is_leaf = not any(True for child in children for _ in child.children())
    holds_blocks = any(isinstance(child, _LISTS) and _repeated(child) for child in children)
    return set() if kind in _LISTS or is_leaf or len(children) < 2 or holds_blocks else {kind}


def _occurs_inside(kind: type[nn.Module], others: set[type[nn.Module]], model: nn.Module) -> bool:
    return any(
        type(inner) is kind for outer in model.modules() if type(outer) in others for inner in outer.modules()
    )


def _outermost(module: nn.Module, kinds: set[type[nn.Module]]) -> Iterator[nn.Module]:
    """Yield the outermost modules of the classes in `kinds`."""
    if type(module) in kinds:
        yield module
        return
    for child in module.children():
        yield from _outermost(child, kinds)


def _run_again(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward method wrapped in a checkpoint.

    The checkpoint has no effect if no gradients are recorded. Lists among the arguments are copied: DenseNet
    passes its layers a list and appends to it afterwards, which the second run must not see.
    """

    def forward_again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        args, kwargs = tree_map(lambda value: value, (args, kwargs))
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return forward_again
