"""Read the sizes that decide the memory of serving a language model."""

from typing import Any

from msgspec import Struct

from planner.capture.models.registry import build_model
from planner.capture.models.transformers.states import (
    keeps_keys,
    kinds_of_layers,
    state_width,
    states_of,
)
from planner.errors import ModelError
from planner.jobs import Job, Precision


class ServedModel(Struct, frozen=True):
    """The sizes that decide the memory of serving a causal language model."""

    name: str
    weight_bytes: int
    item_bytes: int  # size of one number of weights and activations
    layers: int  # number of layers with keys and values
    cached_numbers: int  # elements of keys and values of one token in one layer
    hidden: int
    queries: int  # width of all heads' queries
    keys: int  # width of all heads' keys and values together
    intermediate: int  # width of the MLP, or of all experts that one token goes to
    vocabulary: int
    positions: int  # tokens of the longest text; 0 if the configuration names no limit
    key_heads: int = 1  # heads of keys and values
    sliding_layers: int = 0  # layers whose keys and values cover only a window
    window: int = 0  # tokens of the window; 0 if there is no window
    state_layers: int = 0  # layers that keep a state of fixed size for a sequence
    state_bytes: int = 0  # size of that state for one layer and sequence
    notes: tuple[str, ...] = ()


def served_model(job: Job) -> ServedModel:
    """Return the sizes that decide the memory of serving a job's model.

    Weights and cache are in half precision. Raises ModelError if the model is no decoder of transformers, or
    if its configuration lacks needed values.
    """
    model: Any = build_model(job)
    config = getattr(model, "config", None)
    if (
        config is None
        or not hasattr(config, "get_text_config")
        or getattr(config, "is_encoder_decoder", False)
    ):
        raise ModelError(
            f"{job.model.name}: is no decoder of transformers, whose cache could be known; name a causal "
            "language model, such as hf:LlamaForCausalLM or hf:FOLDER"
        )
    text = config.get_text_config()
    missing = [name for name in ("num_hidden_layers", "hidden_size", "vocab_size") if not hasattr(text, name)]
    is_without_keys = not any(map(keeps_keys, kinds_of_layers(text))) if not missing else False
    if missing or not (is_without_keys or hasattr(text, "num_attention_heads")):
        raise ModelError(
            f"{job.model.name}: its configuration names no {', '.join(missing) or 'attention heads'}"
        )
    item_bytes = 2
    weights = {id(one): one.numel() for one in (*model.parameters(), *model.buffers())}
    heads = 0 if is_without_keys else text.num_attention_heads
    head = 0 if is_without_keys else getattr(text, "head_dim", None) or text.hidden_size // heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    keys = 2 * key_heads * head
    latent = getattr(text, "kv_lora_rank", None)  # multi-head latent attention: one vector for all heads
    window = getattr(text, "sliding_window", None) or 0
    kinds = kinds_of_layers(text)
    layers = sum(map(keeps_keys, kinds))
    with_state, state_bytes = states_of(text, item_bytes)
    sliding = sum("sliding" in kind for kind in kinds) if window else 0
    return ServedModel(
        name=job.model.name,
        weight_bytes=sum(weights.values()) * item_bytes,
        item_bytes=item_bytes,
        layers=layers,
        cached_numbers=latent + text.qk_rope_head_dim if latent else keys,
        hidden=text.hidden_size,
        queries=heads * head,
        keys=keys,
        intermediate=_intermediate(text),
        vocabulary=text.vocab_size,
        positions=getattr(text, "max_position_embeddings", 0) or 0,
        key_heads=1 if latent else key_heads,
        sliding_layers=sliding,
        window=window,
        state_layers=with_state if state_bytes else 0,
        state_bytes=state_bytes,
        notes=tuple(_notes(job, kinds, with_state, state_bytes)),
    )


def _intermediate(text: Any) -> int:
    """Return the total width of a token's experts, or else the larger width of a layer's MLP and state."""
    dense = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * text.hidden_size
    dense = max(dense, state_width(text))
    chosen = getattr(text, "num_experts_per_tok", None)
    return int(chosen * (getattr(text, "moe_intermediate_size", None) or dense) if chosen else dense)


def _notes(job: Job, kinds: list[str], states: int, state_bytes: int) -> list[str]:
    notes = []
    if states and not state_bytes:
        notes.append(f"{states} of {len(kinds)} layers keep a state of fixed size, which is not counted")
    elif states:
        notes.append(
            f"{states} of {len(kinds)} layers keep a state of fixed size for a sequence, one block of each "
            "group, as without prefix caching (vllm/v1/kv_cache_interface.py, MambaSpec); the peak of their "
            "profile run is taken as that of an MLP of their width"
        )
    if any("chunked" in kind for kind in kinds):
        notes.append("layers with chunked attention are counted with whole texts, so more sequences may fit")
    if job.loop.precision in (Precision.FP32, Precision.AMP_BF16, Precision.AMP_FP16):
        notes.append("weights and cache are in half precision, as vLLM serves models saved in float32 too")
    return notes
