"""Make diffusers' models compute position ids and image shapes that are not passed.

Training scripts make the arguments on the GPU for each call. Flux and similar models take the positions of
image and text tokens as rows of three numbers (`FluxPipeline._prepare_latent_image_ids`), Qwen-Image takes
the heights and widths of the images.
"""

import inspect
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn


def add_ids(model: nn.Module) -> None:
    """Make a model's `forward` compute position ids or image shapes that are not passed.

    The arguments are `img_ids` and `txt_ids`, or `img_shapes`.
    """
    parameters = inspect.signature(model.forward).parameters
    forward = model.forward
    if "img_ids" in parameters and "txt_ids" in parameters:

        def forward_with_ids(hidden_states: Tensor, encoder_hidden_states: Tensor, **kwargs: Any) -> Any:
            kwargs.setdefault("img_ids", _positions(hidden_states))
            kwargs.setdefault("txt_ids", _positions(encoder_hidden_states))
            return forward(hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, **kwargs)

        model.forward = forward_with_ids
    elif "img_shapes" in parameters:

        def forward_with_shapes(hidden_states: Tensor, **kwargs: Any) -> Any:
            batch, tokens = hidden_states.shape[:2]
            height = isqrt(tokens)
            while tokens % height:
                height -= 1
            kwargs.setdefault("img_shapes", [[(1, height, tokens // height)]] * batch)
            return forward(hidden_states=hidden_states, **kwargs)

        model.forward = forward_with_shapes


def _positions(tokens: Tensor) -> Tensor:
    """Return zero positions of shape tokens x 3 for hidden states of shape batch x tokens x width."""
    return torch.zeros(tokens.shape[1], 3, device=tokens.device, dtype=tokens.dtype)
