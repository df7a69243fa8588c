"""Find models of torchvision, without reading weights.

A builder may be given weights, which are never read. Named weights matter for a detector: if its backbone
comes with weights, the default, its batch norms and first stages are frozen (`is_trained` in
torchvision/models/detection/faster_rcnn.py and other files there).
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from planner.capture.models.libraries import import_library, unknown_name
from planner.capture.patching import patched


def find_torchvision(name: str) -> Callable[..., object]:
    """Return a function that builds a torchvision model, and accepts weights but does not load them.

    Names are such as `resnet50` or `segmentation.fcn_resnet50`. Raises UsageError for a name that torchvision
    does not list.
    """
    models = import_library("torchvision.models", extra="")
    group, _, plain = name.rpartition(".")
    module = getattr(models, group, None)
    names = models.list_models(module=module) if module else []
    if plain not in (names if group else models.list_models()):
        raise unknown_name("torchvision", name, models.list_models())
    build = models.get_model_builder(plain)

    def construct(**arguments: object) -> object:
        with _without_weights():
            return build(**arguments)

    return construct


class _UnreadWeights(dict[str, Any]):
    """An empty state dict in place of weights that are not downloaded."""


@contextmanager
def _without_weights() -> Iterator[None]:
    load = nn.Module.load_state_dict

    def load_what_was_read(self: nn.Module, state: Any, *args: Any, **options: Any) -> Any:
        return None if isinstance(state, _UnreadWeights) else load(self, state, *args, **options)

    weights = importlib.import_module("torchvision.models._api").WeightsEnum
    with (
        patched(weights, "get_state_dict", lambda self, *args, **options: _UnreadWeights()),
        patched(nn.Module, "load_state_dict", load_what_was_read),
    ):
        yield
