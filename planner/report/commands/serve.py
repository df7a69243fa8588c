"""The report of `planner serve`."""

from collections.abc import Iterator
from typing import Any

from planner.planning import ServingPlan
from planner.report.document import Bullets, Document, Entry, Headline
from planner.report.units import SCHEMA, memory_table, mib, timing_line, to_builtins


def serving_document(plan: ServingPlan, seconds: float) -> Document:
    """Return the report of `planner serve`: the number of sequences, the parts of memory, assumptions."""
    return Document.of(
        [_headline(plan)],
        [memory_table(plan.device.name, _memory(plan))],
        [Bullets("Assumed", tuple(_assumed(plan)))],
        [timing_line(model=seconds)],
    )


def _headline(plan: ServingPlan) -> Headline:
    with_draft = "" if plan.draft is None else f" with the draft model {plan.draft.name}"
    if not plan.starts:
        lacking = plan.requested_bytes + plan.device.context.value - plan.device.usable.value
        text = f"The server does not start: {mib(lacking, 1):,.1f} MiB of its share are not free"
        return Headline((text, Entry("Mend", "a smaller --gpu-memory-utilization")), "bad")
    if plan.cache_bytes <= 0:
        missing = f"{mib(-plan.cache_bytes, 1):,.1f} MiB are missing"
        return Headline((f"{plan.model.name}{with_draft} does not fit: {missing} before any cache",), "bad")
    if not plan.sequences:
        text = f"Not one sequence of {plan.length:,} tokens fits with {plan.model.name}{with_draft}"
        entry = Entry("Longest sequence", f"{plan.tokens:,} tokens")
        return Headline((text, entry), "bad")
    has_keys = bool(plan.model.layers)
    length = f"{plan.length:,} tokens" if has_keys else "any length"
    cache = f"{plan.tokens:,} tokens in {plan.blocks:,} blocks of {plan.settings.block_size}"
    cache = cache if has_keys else f"{plan.blocks:,} states of {plan.model.state_bytes:,} bytes a layer"
    lines: list[str | Entry] = [
        Entry("Sequences", f"{plan.sequences:,} of {length} at once"),
        Entry("Cache", cache),
        Entry("Static cache", f"{plan.static_sequences:,} sequences, if each had its whole length reserved"),
        Entry("Model", f"{plan.model.name}{with_draft}"),
    ]
    return Headline(lines, "good")


def _memory(plan: ServingPlan) -> Iterator[tuple[str, int, str]]:
    share, tokens = plan.settings.gpu_memory_utilization, plan.settings.max_num_batched_tokens
    yield "usable by torch", plan.device.usable.value, plan.device.usable.source
    yield "taken by the server", plan.requested_bytes, f"gpu_memory_utilization {share:g}"
    yield "weights", plan.weight_bytes, "of both models" if plan.draft else "counted, in half precision"
    yield "profile run", plan.profile_bytes, f"{tokens:,} tokens, then the sampler; computed"
    yield "CUDA graphs", plan.graph_bytes, "activations of the largest captured batch; computed"
    state_bytes = plan.model.state_layers * plan.model.state_bytes
    states = f", {state_bytes:,} bytes of states per sequence" if state_bytes else ""
    yield "left for the cache", max(0, plan.cache_bytes), f"{plan.token_bytes:,} bytes per token{states}"


def _assumed(plan: ServingPlan) -> Iterator[str]:
    yield (
        "nothing here is measured: weights and cache are counted, the peaks of the profile run and of CUDA "
        "graphs are computed from the widths of a layer by vLLM's rules (vllm/v1/worker/gpu_worker.py)"
    )
    yield (
        "not counted: what the driver holds for each CUDA graph, NCCL, buffers of attention backends, "
        "adapters and images"
    )
    yield (
        "the CUDA context is not part of the server's share: vLLM reads the free memory once the context is "
        "there, and subtracts what is lost from then on (vllm/utils/mem_utils.py); code of kernels and "
        "workspaces of libraries that are loaded later are not counted"
    )
    groups = plan.groups
    if groups.sliding and groups.full:
        yield (
            f"layers share blocks in {groups.full + groups.sliding} groups of {groups.layers}, of which "
            f"{groups.sliding} keep {groups.window:,} tokens (vllm/v1/core/kv_cache_utils.py)"
        )
        if plan.draft is not None:
            yield "how the draft model's layers join these groups is not modelled; they are counted apart"
    if plan.draft is not None:
        yield "the draft model has a cache of its own for every token, in the same blocks"
    notes = (*plan.model.notes, *(plan.draft.notes if plan.draft is not None else ()))
    yield from dict.fromkeys(notes)


def serving_to_json(plan: ServingPlan, seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner serve`."""
    return {
        "schema": SCHEMA,
        "model": plan.model.name,
        "draft": None if plan.draft is None else plan.draft.name,
        "gpu": plan.device.name,
        "usable_mib": mib(plan.device.usable.value),
        "context_mib": mib(plan.device.context.value),
        "settings": to_builtins(plan.settings),
        "max_model_len": plan.length,
        "starts": plan.starts,
        "sequences": plan.sequences,
        "static_sequences": plan.static_sequences,
        "tokens": plan.tokens,
        "blocks": plan.blocks,
        "bytes_per_token": plan.token_bytes,
        "state_bytes_per_sequence": plan.model.state_layers * plan.model.state_bytes,
        "requested_mib": mib(plan.requested_bytes),
        "weights_mib": mib(plan.weight_bytes),
        "profile_mib": mib(plan.profile_bytes),
        "cuda_graphs_mib": mib(plan.graph_bytes),
        "cache_mib": mib(plan.cache_bytes),
        "measured": False,
        "assumptions": list(_assumed(plan)),
        "seconds": seconds,
    }
