"""Count the sequences that a server's GPU can hold next to the weights.

A sequence takes memory for its keys and values. The rules are from vLLM's V1 engine, which has a paged
key-value cache. It claims a share of the GPU's memory, `gpu_memory_utilization` of the total
(vllm/v1/worker/utils.py, request_memory), and refuses to start if less is free. From the share it subtracts
the GPU memory that was lost since a reading taken after the context was created, and the peak of a profile
run above the memory that stays allocated (vllm/utils/mem_utils.py, memory_profiling), then an estimate of
CUDA graphs (vllm/v1/worker/gpu_worker.py, determine_available_memory). The rest is divided into blocks of
keys and values (vllm/v1/core/kv_cache_utils.py, get_kv_cache_config_from_groups). The profile run passes
`max_num_batched_tokens` tokens through the model without a cache, then samples for `max_num_seqs` sequences
(vllm/v1/worker/gpu_model_runner.py, profile_run). Its peak is computed from the model's widths, since vLLM
runs its own fused operators.
"""

from math import ceil
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import UsageError
from planner.hardware import Device
from planner.jobs import check_count
from planner.program import workspace_bytes

if TYPE_CHECKING:
    from planner.capture import ServedModel

MOST_GRAPH_TOKENS = 512  # of the largest captured batch (vllm/config/vllm.py, _set_cudagraph_sizes)
# Two sizes in bytes: of a key or value (0: as in the model), and of the scales of one head's keys and values
# of a token (vllm/v1/kv_cache_interface.py, AttentionSpec.page_size_bytes).
CACHE_DTYPES = {
    "auto": (0, 0),
    "float16": (2, 0),
    "bfloat16": (2, 0),
    "fp8": (1, 0),
    "fp8_e4m3": (1, 0),
    "fp8_e5m2": (1, 0),
    "int8_per_token_head": (1, 2 * 4),
    "fp8_per_token_head": (1, 2 * 4),
}
LARGE_GPU_BYTES = 70 * 2**30  # GPUs with at least this total, except A100s, have larger defaults
# Defaults of the API server on large GPUs and on others (vllm/engine/arg_utils.py, get_batch_defaults):
TOKENS = {True: 8192, False: 2048}  # of a step
SEQUENCES = {True: 1024, False: 256}
_LONGEST = 2**31


class ServingSettings(Struct, frozen=True):
    """The settings of a server, under vLLM's names. The defaults are from its API server."""

    gpu_memory_utilization: float = 0.92
    block_size: int = 16  # tokens
    max_num_batched_tokens: int = 0  # 0: the default for the GPU
    max_num_seqs: int = 0  # 0: the default for the GPU
    max_model_len: int = 0  # tokens of a sequence; 0: all positions of the model
    kv_cache_dtype: str = "auto"

    def check(self) -> "ServingSettings":
        """Check the settings and return them. Raises UsageError if a setting is invalid."""
        if not 0 < self.gpu_memory_utilization <= 1:
            share = self.gpu_memory_utilization
            raise UsageError(f"--gpu-memory-utilization: {share} is refused; use a share above 0, at most 1")
        if self.kv_cache_dtype not in CACHE_DTYPES:
            known = ", ".join(CACHE_DTYPES)
            raise UsageError(f"--kv-cache-dtype: unknown value {self.kv_cache_dtype!r}; use one of {known}")
        check_count("--block-size", self.block_size, 1024)
        check_count("--max-num-batched-tokens", self.max_num_batched_tokens, 2**24, least=0)
        check_count("--max-num-seqs", self.max_num_seqs, 2**20, least=0)
        check_count("--max-model-len", self.max_model_len, _LONGEST, least=0)
        return self

    def on(self, device: Device) -> "ServingSettings":
        """Return the settings with the GPU's defaults for batched tokens and sequences if they are 0."""
        is_large = device.total.value >= LARGE_GPU_BYTES and "A100" not in device.name
        return replace(
            self,
            max_num_batched_tokens=self.max_num_batched_tokens or TOKENS[is_large],
            max_num_seqs=self.max_num_seqs or SEQUENCES[is_large],
        )


class CacheGroups(Struct, frozen=True):
    """The numbers of layer groups, by kind, among which vLLM shares a pool of key-value cache blocks.

    Each group has its own block table, and all groups have the same number of layers.
    """

    layers: int  # of each group, padded
    full: int  # groups whose layers keep the whole text
    sliding: int  # groups whose layers keep a window
    window: int  # tokens of the window
    states: int = 0  # groups whose layers keep a state, in one block for each sequence

    def blocks_of(self, length: int, settings: ServingSettings) -> int:
        """Return the number of blocks that a sequence of `length` tokens takes in all groups.

        A window may begin within a block, and the new tokens of a step are kept in addition to it until the
        step ends (vllm/v1/kv_cache_interface.py, SlidingWindowSpec.max_memory_usage_bytes).
        """
        whole = -(-length // settings.block_size)
        kept = min(self.window - 1 + settings.max_num_batched_tokens, length)
        return self.full * whole + self.sliding * (-(-kept // settings.block_size) + 1) + self.states


class ServingPlan(Struct, frozen=True):
    """The capacity of a server, in bytes, blocks, tokens and sequences."""

    model: "ServedModel"
    draft: "ServedModel | None"
    device: Device
    settings: ServingSettings
    length: int  # tokens of each sequence
    requested_bytes: int  # the share of the GPU
    weight_bytes: int  # of both models
    profile_bytes: int
    graph_bytes: int
    cache_bytes: int  # the remaining memory for blocks; negative if weights and profile run do not fit
    token_bytes: int  # keys and values of a token in all layers of both models
    blocks: int
    sequences: int  # number of sequences of `length` tokens that fit at once
    groups: CacheGroups
    starts: bool  # whether the share is free after the context is created
    static_sequences: int = 0  # sequences that fit at once if each has a static cache of `length` tokens

    @property
    def tokens(self) -> int:
        """Return the number of tokens whose keys and values fit in the cache.

        A block of tokens takes one block in each layer group. Groups whose layers keep a state are not
        counted; their blocks for one sequence are subtracted first. The number is 0 for a model without keys.
        """
        groups = self.groups.full + self.groups.sliding
        return max(0, self.blocks - self.groups.states) // groups * self.settings.block_size if groups else 0


def plan_serving(
    model: "ServedModel", draft: "ServedModel | None", device: Device, settings: ServingSettings
) -> ServingPlan:
    """Return the capacity of a server: the cache and sequences that fit next to the weights.

    Raises UsageError if the length of a sequence is unknown, or if a model with states has a draft model.
    """
    settings = settings.on(device)
    length = settings.max_model_len or model.positions
    if model.state_layers and draft is not None:
        raise UsageError(f"{model.name}: states of drafted tokens are not planned; remove --draft")
    settings = replace(settings, block_size=block_tokens(model, settings))
    if not length and model.layers:
        raise UsageError(f"{model.name}: its longest text is unknown; give --max-model-len, such as 4096")
    models = (model,) if draft is None else (model, draft)
    requested = ceil(device.usable.value * settings.gpu_memory_utilization)
    weights = sum(one.weight_bytes for one in models)
    profile = max(profile_bytes(one, settings) for one in models) + workspace_bytes(device.capability)
    graphs = sum(activation_bytes(one, min(MOST_GRAPH_TOKENS, 2 * settings.max_num_seqs)) for one in models)
    cache = requested - weights - profile - graphs
    groups = group_layers(model)
    block = settings.block_size * layer_bytes(model, settings) if model.layers else model.state_bytes
    page = groups.layers * block  # in the layers of a group
    page += 0 if draft is None else draft.layers * layer_bytes(draft, settings) * settings.block_size
    starts = requested <= device.usable.value - device.context.value
    blocks = max(0, cache // page - 1) if page and starts else 0  # one block stays empty
    token = sum(one.layers * layer_bytes(one, settings) for one in models)
    states = model.state_layers * model.state_bytes
    return ServingPlan(
        model, draft, device, settings, length, requested, weights, profile, graphs, cache, token, blocks,
        sequences=min(settings.max_num_seqs, blocks // groups.blocks_of(length, settings)),
        groups=groups,
        starts=starts,
        static_sequences=max(0, cache // (token * length + states)) if token or states else 0,
    )  # fmt: skip


def group_layers(model: "ServedModel") -> CacheGroups:
    """Return the KV-cache groups into which vLLM divides a model's layers.

    If some layers have a window or a state, a group has as many layers as the rarest kind of layer, or as the
    most frequent kind if it has fewer than 1.5 times as many. Source: kv_cache_utils.py,
    _get_kv_cache_groups_uniform_page_size.
    """
    sliding, states = model.sliding_layers, model.state_layers
    full = model.layers - sliding
    counts = [count for count in (full, sliding, states) if count] or [1]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    return CacheGroups(size, -(-full // size), -(-sliding // size), model.window, -(-states // size))


def block_tokens(model: "ServedModel", settings: ServingSettings) -> int:
    """Return the number of tokens per block of the key-value cache.

    For a model with states it is raised until a layer's keys and values of a block take at least as much as a
    state (vllm/platforms/interface.py, _align_hybrid_block_size).
    """
    if not model.state_layers or not model.layers:
        return settings.block_size
    least = max(16, settings.block_size)  # the smallest that FlashAttention supports
    return least * -(-model.state_bytes // (least * layer_bytes(model, settings)))


def layer_bytes(model: "ServedModel", settings: ServingSettings) -> int:
    """Return the bytes of one token's keys and values in one layer."""
    number, scales = CACHE_DTYPES[settings.kv_cache_dtype]
    return model.cached_numbers * (number or model.item_bytes) + model.key_heads * scales


def activation_bytes(model: "ServedModel", tokens: int) -> int:
    """Return the peak bytes of one layer's activations for `tokens` tokens.

    They are the residual, its norm, and the tensors of attention or the MLP. Attention holds queries, keys
    and values in one tensor, and its output. The MLP holds gate and up in one tensor, and their product
    (vllm/model_executor/models/llama.py). The larger of the two counts.
    """
    attention = 2 * model.queries + model.keys
    return model.item_bytes * tokens * (2 * model.hidden + max(attention, 3 * model.intermediate))


def profile_bytes(model: "ServedModel", settings: ServingSettings) -> int:
    """Return the peak of vLLM's profile run in bytes: the larger of a layer's and the sampler's peak."""
    return max(activation_bytes(model, settings.max_num_batched_tokens), sampler_bytes(model, settings))


def sampler_bytes(model: "ServedModel", settings: ServingSettings) -> int:
    """Return the peak bytes of the sampler, including the last hidden states of all tokens.

    The sampler holds the logits, which the caller holds too, their copy in float32
    (vllm/v1/sample/sampler.py), the probabilities, and random numbers of the same shape
    (vllm/v1/sample/ops/topk_topp_sampler.py, random_sample).
    """
    tokens = settings.max_num_batched_tokens
    rows = min(settings.max_num_seqs, tokens)
    logits = rows * model.vocabulary * (model.item_bytes + 4 + 4 + 4)
    return model.item_bytes * tokens * model.hidden + logits
