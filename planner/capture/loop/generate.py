"""Generate text with a causal language model of transformers (`--mode generate`).

The loop follows `GenerationMixin._sample` (transformers/generation/utils.py, 5.23) with greedy search and a
`DynamicCache`; its variables live as long as in `_sample`. No value is read: all sequences run to the last
token.
"""

import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.capture.loop.runtime import BatchLoader, LoopRuntime, PhaseHook
from planner.capture.models.transformers.build import is_padded
from planner.capture.models.transformers.key_value_cache import WHOLE_TOKENS, grow
from planner.errors import ModelError
from planner.jobs import Job
from planner.program import Phase

MOST_GROWTHS = 256  # most growths of the cache; if more tokens are between, it grows by several at once


def run_generation(
    model: nn.Module, job: Job, load_batch: BatchLoader, on_phase: PhaseHook, runtime: LoopRuntime
) -> tuple[str, ...]:
    """Load a prompt and generate the job's new tokens in each step, and return notes on skipped tokens.

    The prompt is the job's `input_ids`, or its first input. Raises ModelError for a model that does not
    generate as transformers' decoders do.
    """
    _refuse_others(model, job)
    model.eval()
    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    tokens: Tensor | None = None
    with torch.no_grad():
        for step in range(1, job.loop.steps + 1):
            on_phase(step, Phase.INPUTS)
            args, kwargs = (), {}  # the last prompt is released before the next is copied
            args, kwargs, _ = load_batch()
            on_phase(step, Phase.FORWARD)
            with runtime.autocast():
                tokens = _generate(model, _prepare(model, args, kwargs, job), job)
        on_phase(job.loop.steps, Phase.END)
    del tokens
    return _left_out(job.loop.new_tokens)


def _left_out(new_tokens: int) -> tuple[str, ...]:
    strides = _growths(new_tokens)
    if not strides:
        return ()
    by = f", by up to {strides[0]} tokens at once" if strides[0] > 1 else ""
    return (
        f"of the tokens between the first {WHOLE_TOKENS} and the last {WHOLE_TOKENS}, only the growth of the "
        f"key-value cache is traced{by}",
    )


def _growths(new_tokens: int) -> list[int]:
    """Return the number of tokens of each growth of the key-value cache without a run of the model.

    The first and last `WHOLE_TOKENS` tokens run through the model; for tokens between, only the cache grows.
    There are at most `MOST_GROWTHS` growths.
    """
    between = max(new_tokens - 2 * WHOLE_TOKENS, 0)
    stride = -(-between // MOST_GROWTHS)
    return [min(stride, between - start) for start in range(0, between, stride)] if between else []


def _refuse_others(model: nn.Module, job: Job) -> None:
    config, can_generate = getattr(model, "config", None), getattr(model, "can_generate", None)
    if config is None or can_generate is None or not can_generate():
        problem = "is no causal language model of transformers"
    elif getattr(config, "is_encoder_decoder", False):
        problem = "has an encoder and a decoder, whose generation is not modelled"
    elif getattr(model, "_is_stateful", False):
        problem = "keeps a state in place of a key-value cache, which is not modelled"
    else:
        return
    raise ModelError(f"{job.model.name}: {problem}; use --mode infer, or a model such as hf:LlamaForCausalLM")


@dataclass(slots=True)
class _Text:
    """A prompt and its generated tokens, batch x length, with their positions and mask.

    Positions and mask are each None if the model does not get them.
    """

    tokens: Tensor
    positions: Tensor | None
    mask: Tensor | None

    def inputs(self, last: int) -> dict[str, Any]:
        """Return the model's inputs for the last `last` tokens. The mask covers the whole text."""
        inputs = {"input_ids": self.tokens[:, -last:].clone(), "attention_mask": self.mask}
        if self.positions is not None:
            inputs["position_ids"] = self.positions[:, -last:].clone()
        return {name: tensor for name, tensor in inputs.items() if tensor is not None}

    def lengthen(self, more: int) -> None:
        """Lengthen positions and mask by `more` tokens."""
        if self.positions is not None:
            following = torch.arange(more, device=self.positions.device) + self.positions[:, -1:] + 1
            self.positions = torch.cat([self.positions, following], dim=-1)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(self.mask.shape[0], more)], dim=-1)


def _prepare(model: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], job: Job) -> _Text:
    """Return the prompt with its positions and mask.

    Positions and mask are each None if the model does not take them. The mask is None as well if the job does
    not pad.
    """
    taken = inspect.signature(model.forward).parameters
    prompt = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
    mask = kwargs["attention_mask"] if "attention_mask" in kwargs else torch.ones_like(prompt)
    positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0) if "position_ids" in taken else None
    return _Text(prompt, positions, mask if is_padded(job) and "attention_mask" in taken else None)


def _generate(model: Any, text: _Text, job: Job) -> Tensor:
    """Return the prompt and `job.loop.new_tokens` generated tokens, batch x length."""
    from transformers import DynamicCache  # slow to import, and only needed here

    cache = DynamicCache(config=model.config)
    keywords: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "return_dict": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        keywords["logits_to_keep"] = 1  # of the prompt too
    first, growths = min(job.loop.new_tokens, WHOLE_TOKENS), _growths(job.loop.new_tokens)
    for number, growth in enumerate(
        [0] * first + growths + [0] * (job.loop.new_tokens - first - sum(growths))
    ):
        if growth:
            grow(cache, growth)
            text.lengthen(growth)
        else:
            with _decoding(model) if number else nullcontext():
                output = model(**text.inputs(1 if number else text.tokens.shape[1]), **keywords)
            text.lengthen(1)
            scores = output.logits[:, -1].to(copy=True, dtype=torch.float32)  # lives until the next scores
            chosen = scores.argmax(-1)[:, None]
            del output
        text.tokens = torch.cat([text.tokens, chosen.expand(-1, growth or 1)], dim=-1)
    return text.tokens


def _decoding(model: Any) -> AbstractContextManager[object]:
    """Return a context in which transformers runs mixtures of experts in their mode for decoding.

    The context has no effect if the model has no such mode.
    """
    optimized = getattr(model, "_optimize_model_for_decode", None)
    return nullcontext() if optimized is None else optimized()
