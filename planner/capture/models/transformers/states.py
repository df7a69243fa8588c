"""Compute the sizes of the states that Mamba-like layers keep.

A state replaces the keys and values of a sequence, and has a fixed size. A state consists of the last inputs
of a convolution, and the numbers that a scan or a delta rule carries on; shapes follow
vllm/model_executor/layers/mamba/mamba_utils.py. Both have the type of the model unless its configuration
names another type for the latter.
"""

from collections.abc import Callable, Mapping
from typing import Any

_LINEAR = ("linear", "mamba", "conv", "recurrent", "hybrid")  # kinds of layers with a state
_BOTH = ("falcon_h1", "zamba2")  # each layer has a state, and some also keys and values
_ALL = ("mamba", "mamba2", "falcon_mamba")  # no layer has keys and values
_WIDE = {"float32": 4}  # bytes of an element, by the type that a configuration names


def kinds_of_layers(text: Any) -> list[str]:
    """Return the type of each layer of a decoder, such as "mamba". `text` is the decoder's configuration."""
    if text.model_type in _ALL:
        return ["mamba"] * int(text.num_hidden_layers)
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
    usual = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    return list(kinds or [usual] * text.num_hidden_layers)


def keeps_keys(kind: str) -> bool:
    """Return whether a layer of this kind keeps keys and values. Zamba2's hybrid layers also keep a state."""
    return kind == "hybrid" or not any(word in kind for word in _LINEAR)


def states_of(text: Any, item_bytes: int) -> tuple[int, int]:
    """Return the number of layers with a state, and one state's bytes. The bytes are 0 if unknown."""
    kinds = kinds_of_layers(text)
    is_each = text.model_type in (*_BOTH, *_ALL)
    layers = len(kinds) if is_each else sum(not keeps_keys(one) for one in kinds)
    shape = _SHAPES.get(text.model_type, _delta if hasattr(text, "linear_num_key_heads") else None)
    if not layers or shape is None:
        return layers, 0
    past, carried = shape(text)
    carried_bytes = _WIDE.get(str(getattr(text, "mamba_ssm_dtype", "")), item_bytes)
    return layers, past * item_bytes + carried * carried_bytes


def state_width(text: Any) -> int:
    """Return the width of the layers with a state, or 0 if unknown."""
    for name in ("mamba_d_ssm", "intermediate_size" if text.model_type in ("mamba", "falcon_mamba") else ""):
        if name and getattr(text, name, None):
            return int(getattr(text, name))
    factor = getattr(text, "mamba_expand", None) or getattr(text, "expand", None)
    return int(factor * text.hidden_size) if factor else 0


def _scan(text: Any, state: str, kernel: str) -> tuple[int, int]:
    """Return the sizes of Mamba's convolution and recurrent states, in elements.

    `state` and `kernel` name the attributes of the state's size and the convolution's width.
    """
    width = state_width(text)
    return (getattr(text, kernel) - 1) * width, width * getattr(text, state)


def _heads(text: Any, groups: str, heads: str, head: str, state: str, kernel: str) -> tuple[int, int]:
    """Return the sizes of Mamba 2's convolution and recurrent states, in elements.

    The convolution also takes the inputs that groups of heads share. The strings name attributes of `text`.
    """
    numbers = [getattr(text, name) for name in (groups, heads, head, state, kernel)]
    shared, count, size, carried, taps = numbers
    return (taps - 1) * (state_width(text) + 2 * shared * carried), count * size * carried


def _delta(text: Any) -> tuple[int, int]:
    """Return the sizes of a gated delta net's convolution and recurrent states, in elements."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    return (text.linear_conv_kernel_dim - 1) * (2 * keys + values), values * text.linear_key_head_dim


_BAMBA = ("mamba_n_groups", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_d_conv")
_SHAPES: Mapping[str, Callable[[Any], tuple[int, int]]] = {
    **dict.fromkeys(("mamba", "falcon_mamba"), lambda text: _scan(text, "state_size", "conv_kernel")),
    "jamba": lambda text: _scan(text, "mamba_d_state", "mamba_d_conv"),
    "mamba2": lambda text: _heads(text, "n_groups", "num_heads", "head_dim", "state_size", "conv_kernel"),
    **dict.fromkeys(("bamba", "granitemoehybrid", "falcon_h1"), lambda text: _heads(text, *_BAMBA)),
    "lfm2": lambda text: ((text.conv_L_cache - 1) * text.hidden_size, 0),
}
