"""Grow a transformers decoder's cache by tokens that do not run through the model.

While a text is generated, each token in its middle takes as much memory as the token before it, plus the
cached keys and values of one token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from planner.capture.patching import patched

WHOLE_TOKENS = 4  # at either end of a generated text that run through the model


def grow(cache: Any, tokens: int) -> None:
    """Append keys and values of new tokens to each layer's cache.

    They are uninitialised, and appended as by a forward pass.
    """
    for number, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None and getattr(layer, "values", None) is not None:
            # No variable may hold the old keys and values, which are freed once the longer tensors are made.
            cache.update(_new_states(layer.keys, tokens), _new_states(layer.values, tokens), number)


@contextmanager
def only_growing_between(model: Any, length: int) -> Iterator[None]:
    """Run the model only on the first and last tokens of a text inside the context.

    For the tokens between, forward passes only grow the key-value cache. The first and the last
    `WHOLE_TOKENS` of `length` tokens run, and all forward passes without cached tokens.
    """
    plain = model.forward
    last: list[Any] = []  # the output's class, an empty tensor like its logits, and their shape

    @wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        cache = getattr(cache, "self_attention_cache", cache)
        tokens = 0 if cache is None else cache.get_seq_length()
        if last and WHOLE_TOKENS <= tokens < length - WHOLE_TOKENS:
            kind, like, shape = last
            grow(cache, 1)
            return kind(logits=like.new_empty(shape), past_key_values=kwargs["past_key_values"])
        output = plain(*args, **kwargs)
        if tokens:
            last[:] = type(output), output.logits.new_empty(0), output.logits.shape
        return output

    with patched(model, "forward", forward):
        yield


def _new_states(cached: Tensor, tokens: int) -> Tensor:
    """Return uninitialised keys or values for new tokens. The shape is batch x heads x tokens x width."""
    batch, heads, _, width = cached.shape
    return cached.new_empty(batch, heads, tokens, width)
