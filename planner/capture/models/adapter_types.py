"""Give peft's adapters on the meta device the dtype that they have on a GPU."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from planner.capture.cuda.devices.placement import current_placement, is_put_on_gpu
from planner.capture.patching import patched


@contextmanager
def adapters_like_weights() -> Iterator[None]:
    """Give each adapter added inside the context the data type and GPU placement of its layer's weight.

    Only adapters of layers with floating-point meta weights are changed.

    peft does the same when it moves adapters to the device of the layer's weights, but skips meta weights
    (`_move_adapter_to_device_of_base_layer`, peft/tuners/tuners_utils.py).
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        yield
        return
    layer = tuners.BaseTunerLayer
    plain = layer._move_adapter_to_device_of_base_layer

    def move(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        plain(self, adapter_name, *args, **kwargs)
        _give_type_of_weight(self, adapter_name)

    with patched(layer, "_move_adapter_to_device_of_base_layer", move):
        yield


def _give_type_of_weight(layer: Any, adapter_name: str) -> None:
    weight = getattr(layer.get_base_layer(), "weight", None)
    if weight is None or not weight.is_meta or not weight.is_floating_point():
        return
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        held = getattr(layer, name, None)
        if isinstance(held, nn.ModuleDict) and adapter_name in held:
            parameters = list(held[adapter_name].parameters())
        elif isinstance(held, nn.ParameterDict) and adapter_name in held:
            parameters = [held[adapter_name]]
        else:
            continue
        for parameter in parameters:
            if parameter.is_meta and parameter.is_floating_point():
                parameter.data = parameter.data.to(weight.dtype)
            if is_put_on_gpu(weight):
                current_placement().put(parameter)
