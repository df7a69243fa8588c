"""The call stacks of allocations, reduced to a line of code and a category.

The category follows from functions of torch and of libraries around it: `Module._apply` moves parameters, the
wrapper of `Optimizer.step` is on the stack of every optimizer, and autograd's threads run no Python
functions, except functions named `backward`.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from planner.program import Category, Site

Origin = tuple[Site, Category | None]
NO_SITE = Site("", "")
_THEIR_CODE = ("/torch/", "<")  # in the paths of frames outside the user's code
_AUTOGRAD = "torch::autograd::"  # in the names of C++ frames

# Patterns of a path and of a function's name, and the category; with None the category is unknown, even if an
# outer function has a rule.
_RULES: tuple[tuple[str, str, Category | None], ...] = (
    (r"torch/nn/modules/module\.py", r"_apply|convert|register_buffer", Category.PARAMETER),
    (r"torch/nn/modules/module\.py", r"_(wrapped_)?call_impl", Category.ACTIVATION),
    (r"torch/nn/modules/\w+\.py", r"__init__|reset_parameters", Category.PARAMETER),
    (r"torch/nn/(init|parameter)\.py", r".*", Category.PARAMETER),
    (r"torch/nn/parallel/distributed\.py", r"_ddp_init_helper", Category.GRADIENT),  # DDP's buckets
    (r"torch/distributed/fsdp/.*_fsdp_collectives\.py", r"foreach_reduce.*", Category.GRADIENT),
    (r"torch/distributed/fsdp/.*(_fsdp_collectives|_param|_param_group)\.py", r".*", Category.PARAMETER),
    (r"torch/optim/.*", r".*", Category.OPTIMIZER),
    (r".*", r"backward", Category.GRADIENT),
    (r".*", r"from_pretrained|load_state_dict", Category.PARAMETER),
    (r".*", r"_prepare_inputs?|send_to_device|move_data_to_device|batch_to_device", Category.INPUT),
    (r".*", r"closure", None),  # an optimizer calls it to compute the loss
)
_COMPILED = tuple(
    (re.compile(rf"(?:.*/)?{path}"), re.compile(function), category) for path, function, category in _RULES
)


class Stack:
    """A call stack, reduced to a line of the user's code and a category.

    The line comes from the innermost frame of Python outside torch. The innermost frame of Python with a rule
    decides the category; a stack with C++ frames of autograd and no Python frame belongs to the backward
    pass.
    """

    __slots__ = ("_decision", "_is_autograd", "_is_python", "_site")

    def __init__(self, frames: Iterable[dict[str, Any]] = ()) -> None:
        self._site = NO_SITE
        self._decision: tuple[bool, Category | None] = False, None
        self._is_python = self._is_autograd = False
        self.extend(frames)

    def extend(self, frames: Iterable[dict[str, Any]]) -> None:
        """Add the next outer frames of the stack, which called the frames that were added before."""
        for frame in frames:
            path, function, line = frame["filename"], frame.get("name"), frame.get("line")
            function = function if isinstance(function, str) else "?"
            if not isinstance(path, str):
                continue
            if path.endswith(".py"):
                self._is_python = True
                if not self._decision[0]:
                    self._decision = function_category(path.replace("\\", "/"), function)
                if self._site is NO_SITE and not any(own in path for own in _THEIR_CODE):
                    place = f"{'/'.join(path.split('/')[-2:])}:{line if isinstance(line, int) else '?'}"
                    self._site = Site(place, function)
            elif function.startswith(_AUTOGRAD):
                self._is_autograd = True

    @property
    def origin(self) -> Origin:
        """Return the line of the user's code, and the category of the allocated blocks, None if unknown."""
        if self._is_autograd and not self._is_python:
            return self._site, Category.GRADIENT
        return self._site, self._decision[1]


NO_STACK = Stack()


@lru_cache(maxsize=2**14)
def function_category(path: str, name: str) -> tuple[bool, Category | None]:
    """Return whether a rule in `_RULES` matches a Python function, and its blocks' category or None.

    The category is None if it is unknown or no rule matches.
    """
    for path_pattern, name_pattern, category in _COMPILED:
        if name_pattern.fullmatch(name) and path_pattern.fullmatch(path):
            return True, category
    return False, None
