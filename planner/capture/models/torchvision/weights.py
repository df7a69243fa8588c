"""torchvision's weights are named, since they decide how some models are built, but never read.

A detector whose backbone comes with weights, which is the default, freezes its batch norms and first stages
(torchvision/models/detection/faster_rcnn.py and its neighbours, `is_trained`).
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn


class _Unread(dict[str, Any]):
    """Weights that are not fetched."""


def without_reading_weights(constructor: Callable[..., object]) -> Callable[..., object]:
    """Return a builder of torchvision that accepts weights, and leaves its model without them."""

    def construct(**arguments: object) -> object:
        with _nothing_read():
            return constructor(**arguments)

    return construct


@contextmanager
def _nothing_read() -> Iterator[None]:
    load = nn.Module.load_state_dict

    def load_what_is_there(self: nn.Module, state: Any, *args: Any, **options: Any) -> Any:
        return None if isinstance(state, _Unread) else load(self, state, *args, **options)

    weights = importlib.import_module("torchvision.models._api").WeightsEnum
    with (
        mock.patch.object(weights, "get_state_dict", lambda self, *args, **options: _Unread()),
        mock.patch.object(nn.Module, "load_state_dict", load_what_is_there),
    ):
        yield
