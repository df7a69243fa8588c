"""Make transformers treat attention masks as padded or full.

The values of the masks are not read. transformers reads whether the attention mask masks anything
(masking_utils.py). If not, it makes no mask, and attention runs with `is_causal` or without a mask; if so, it
makes a boolean mask of batch x 1 x rows x columns. In a capture the job's `padded` decides. Packed sequences
are not looked for, and checks of inputs pass.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from planner.capture.models.libraries import quiet
from planner.capture.patching import patched

_MASKS = "transformers.masking_utils"
_RECURRENT = "create_recurrent_attention_mask"


@contextmanager
def assume_padding(padded: bool) -> Iterator[None]:
    """Make transformers assume padded or full attention masks inside the context, without reading them."""
    with ExitStack() as stack:
        stack.enter_context(quiet())
        # `torch_compilable_check` of transformers: the inputs are assumed to be valid
        stack.enter_context(patched(torch, "_check_tensor_all_with", lambda *_: None))
        masks = sys.modules.get(_MASKS)
        for module, name, replacement in _answers(masks, padded) if masks is not None else ():
            stack.enter_context(patched(module, name, replacement))
        yield


def _answers(masks: Any, padded: bool) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield replacements for transformers' functions that read attention masks.

    The items are (module, name, replacement), for transformers 5.
    """
    find_packed = masks.find_packed_sequence_indices

    def find_no_packed(position_ids: Any) -> None:
        find_packed(position_ids)  # for its temporaries; positions that simply count up end without a mask

    yield masks, "find_packed_sequence_indices", find_no_packed
    # If transformers takes its code to be traced, it does not read the mask, and always makes one. Without a
    # mask there is nothing to read.
    yield masks, "is_tracing", lambda tensor=None: tensor is not None
    if padded:
        return
    for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
        if hasattr(masks, name):
            yield masks, name, partial(_decide_without, getattr(masks, name))
    for module in sys.modules.copy().values():  # models import this one by its name
        if getattr(module, "__name__", "").startswith("transformers.") and _RECURRENT in vars(module):
            yield module, _RECURRENT, lambda *_, **__: None


def _decide_without(decide: Callable[..., bool], padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
    """Call a masking function without a padding mask, and return its result.

    The function is of masking_utils. `padding_mask` is ignored.
    """
    return decide(None, *args, **kwargs)
