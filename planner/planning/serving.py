"""Count the sequences that a server with a paged key-value cache holds beside the weights.

The rules are vLLM's: it takes a share of the GPU's memory, `gpu_memory_utilization`; what weights, the peak
of a profile run and CUDA graphs leave of it is divided into blocks of keys and values
(vllm/v1/worker/gpu_worker.py, determine_available_memory; vllm/v1/core/kv_cache_utils.py). The profile run
passes `max_num_batched_tokens` tokens through the model without a cache, then samples for `max_num_seqs`
sequences (vllm/v1/worker/gpu_model_runner.py, profile_run). Its peak is computed from widths, since vLLM runs
fused operators of its own.
"""

from typing import TYPE_CHECKING

from msgspec import Struct

from planner.errors import UsageError
from planner.hardware import Device
from planner.jobs import check_count

if TYPE_CHECKING:
    from planner.capture import ServedModel

MOST_GRAPH_TOKENS = 512  # of the largest captured batch (vllm/config/vllm.py, _set_cudagraph_sizes)
CACHE_DTYPES = {"auto": 0, "fp8": 1}  # bytes of a key or value; 0: as the model
_LONGEST = 2**31


class ServingSettings(Struct, frozen=True):
    """Settings of the server, by vLLM's names; the defaults are those of its engine for large GPUs."""

    gpu_memory_utilization: float = 0.9
    block_size: int = 16  # tokens
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int = 0  # tokens of a sequence; 0: all positions of the model
    kv_cache_dtype: str = "auto"

    def check(self) -> "ServingSettings":
        """Return the settings. Raises UsageError for one that a server could not have."""
        if not 0 < self.gpu_memory_utilization <= 1:
            share = self.gpu_memory_utilization
            raise UsageError(f"--gpu-memory-utilization: {share} is refused; use a share from 0 to 1")
        if self.kv_cache_dtype not in CACHE_DTYPES:
            known = ", ".join(CACHE_DTYPES)
            raise UsageError(f"--kv-cache-dtype: unknown value {self.kv_cache_dtype!r}; use one of {known}")
        check_count("--block-size", self.block_size, 1024)
        check_count("--max-num-batched-tokens", self.max_num_batched_tokens, 2**24)
        check_count("--max-num-seqs", self.max_num_seqs, 2**20)
        check_count("--max-model-len", self.max_model_len, _LONGEST, least=0)
        return self


class ServingPlan(Struct, frozen=True):
    """Capacity of a server, in bytes, blocks, tokens and sequences."""

    model: "ServedModel"
    draft: "ServedModel | None"
    device: Device
    settings: ServingSettings
    length: int  # tokens of each sequence
    requested_bytes: int  # the share of the GPU
    weight_bytes: int  # of both models
    profile_bytes: int
    graph_bytes: int
    cache_bytes: int  # what is left for blocks; less than 0 where weights and profile run do not fit
    token_bytes: int  # keys and values of a token in all layers of both models
    blocks: int
    sequences: int  # of the length, at once
    static_sequences: int  # with a static cache of the length for each, in place of blocks

    @property
    def tokens(self) -> int:
        """Return the tokens that the blocks hold."""
        return self.blocks * self.settings.block_size


def plan_serving(
    model: "ServedModel", draft: "ServedModel | None", device: Device, settings: ServingSettings
) -> ServingPlan:
    """Return what fits beside the weights. Raises UsageError where the length of a sequence is unknown."""
    length = settings.max_model_len or model.positions
    if not length:
        raise UsageError(f"{model.name}: its longest text is unknown; give --max-model-len, such as 4096")
    models = (model,) if draft is None else (model, draft)
    requested = int(device.usable.value * settings.gpu_memory_utilization)
    weights = sum(one.weight_bytes for one in models)
    profile = max(profile_bytes(one, settings) for one in models)
    graphs = sum(activation_bytes(one, min(MOST_GRAPH_TOKENS, 2 * settings.max_num_seqs)) for one in models)
    cache = requested - device.context.value - weights - profile - graphs
    token = sum(token_bytes(one, settings) for one in models)
    blocks = max(0, cache // (token * settings.block_size) - 1) if token else 0  # one is never given out
    each = -(-length // settings.block_size)
    return ServingPlan(
        model, draft, device, settings, length, requested, weights, profile, graphs, cache, token, blocks,
        sequences=min(settings.max_num_seqs, blocks // each),
        static_sequences=max(0, cache // (token * length)) if token else 0,
    )  # fmt: skip


def token_bytes(model: "ServedModel", settings: ServingSettings) -> int:
    """Return the keys and values of one token in all layers."""
    return model.layers * model.cached_numbers * (CACHE_DTYPES[settings.kv_cache_dtype] or model.item_bytes)


def activation_bytes(model: "ServedModel", tokens: int) -> int:
    """Return the peak of one layer: the residual and its norm beside attention or the MLP.

    Attention has queries, keys and values in one tensor and its output; the MLP gate and up in one tensor and
    their product (vllm/model_executor/models/llama.py).
    """
    attention = 2 * model.queries + model.keys
    return model.item_bytes * tokens * (2 * model.hidden + max(attention, 3 * model.intermediate))


def profile_bytes(model: "ServedModel", settings: ServingSettings) -> int:
    """Return the peak of the profile run: the layers, or the sampler beside the last hidden states.

    The sampler has logits, their copy in float32 and probabilities (vllm/v1/sample/sampler.py).
    """
    tokens = settings.max_num_batched_tokens
    rows = min(settings.max_num_seqs, tokens)
    sampler = rows * model.vocabulary * (model.item_bytes + 4 + 4)
    hidden = model.item_bytes * tokens * model.hidden
    return max(activation_bytes(model, tokens), hidden + sampler)
