"""Tensors that transformers 4.51.3 saved and transformers 5 does not, for runs published with it.

Only what the T5, GPT-2 and GPT-Neo models of `published/runs_torch26.csv` run. Each difference was read in
the sources of both versions; none was fitted. With 4.51.3 itself in place of this module the replayed peaks
differ by at most 0.5 %.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


@contextmanager
def as_transformers_4_51() -> Iterator[None]:
    """Make the installed transformers 5 save the tensors of 4.51.3 while open."""
    from transformers import cache_utils, masking_utils, modeling_utils
    from transformers.models.gpt2 import modeling_gpt2
    from transformers.models.t5 import modeling_t5

    attention, masks = modeling_utils.ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    with ExitStack() as stack:
        for where, name, replacement in (
            (cache_utils.DynamicLayer, "update", _cache_update(cache_utils.DynamicLayer.update)),
            (modeling_gpt2.GPT2Attention, "__init__", _gpt2_buffers(modeling_gpt2.GPT2Attention.__init__)),
            (modeling_t5.T5Attention, "forward", _t5_attention(modeling_t5.T5Attention.forward)),
            (modeling_t5, "eager_attention_forward", _t5_eager),
        ):
            stack.enter_context(mock.patch.object(where, name, replacement))
        mapping = {"sdpa": _contiguous(attention["sdpa"])}
        stack.enter_context(mock.patch.dict(attention._global_mapping, mapping))
        # modeling_attn_mask_utils.py: a mask of floats made once; transformers 5 hands each layer's attention
        # a mask of booleans, which makes floats of it again and again.
        stack.enter_context(mock.patch.dict(masks._global_mapping, {"sdpa": masks["eager"]}))
        yield


def _cache_update(update: Any) -> Any:
    """cache_utils.py, DynamicCache.update: the first keys and values are stored without a copy.

    So they are views of the projection's output, and keep all of it alive with the model's output.
    """

    def updated(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_initialized:
            return update(self, key_states, value_states, *args, **kwargs)
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    return updated


def _gpt2_buffers(construct: Any) -> Any:
    """models/gpt2/modeling_gpt2.py: each attention layer registers a causal mask of its own and a number."""

    def constructed(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, config, *args, **kwargs)
        positions = config.max_position_embeddings
        self.register_buffer("bias", torch.ones(1, 1, positions, positions, dtype=torch.bool))
        self.register_buffer("masked_bias", torch.tensor(-1e4))

    return constructed


def _contiguous(attend: Any) -> Any:
    """integrations/sdpa_attention.py: query, key and value are made contiguous first."""

    def attended(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Any:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        return attend(module, query, key, value, mask, **kwargs)

    return attended


def _t5_attention(forward: Any) -> Any:
    """models/t5/modeling_t5.py: all layers share the sum of position bias and mask that the first makes."""

    def attended(
        self: Any,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if position_bias is None:
            rows = hidden_states.shape[1]
            columns = (hidden_states if key_value_states is None else key_value_states).shape[1]
            if self.has_relative_attention_bias:
                position_bias = self.compute_bias(rows, columns, device=hidden_states.device)
            else:
                position_bias = hidden_states.new_zeros(1, self.n_heads, rows, columns)
            if mask is not None:
                position_bias = position_bias + mask
        return forward(self, hidden_states, None, key_value_states, position_bias, *args, **kwargs)

    return attended


def _t5_eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float,
    position_bias: Tensor, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """models/t5/modeling_t5.py: no scaling, and the bias added in place; T5 had no other attention."""
    scores = torch.matmul(query, key.transpose(2, 3))
    scores += position_bias
    weights = torch.dropout(torch.softmax(scores, -1), dropout, module.training)
    del scores
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
