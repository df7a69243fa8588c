"""The command `planner serve`."""

from typing import Annotated, Any

from planner.cli.options import DEVICE, JOB, Answer, option, with_options
from planner.program import OnProgress

_MODEL = {name: JOB[name] for name in ("model", "model_arg", "models", "allow_code")}
_GPU = {name: DEVICE[name] for name in ("gpu", "gpu_mib")}


@with_options(_MODEL, _GPU)
def serve_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    draft: Annotated[
        str | None, option("NAME", "A smaller draft model on the same GPU, as for speculative decoding.")
    ],
    max_model_len: Annotated[
        int | None, option("N", "Tokens of a sequence, prompt and answer; by default all positions.")
    ],
    max_num_batched_tokens: Annotated[
        int | None,
        option("N", "Tokens of one step, which the profile run takes; by default as vLLM's API server."),
    ],
    max_num_seqs: Annotated[
        int | None, option("N", "Most sequences at once; by default 1024 on large GPUs, else 256.")
    ],
    gpu_memory_utilization: Annotated[
        float | None, option("SHARE", "Share of the GPU that the server takes; 0.92 by default.")
    ],
    block_size: Annotated[int | None, option("N", "Tokens of a block of the cache; 16 by default.")],
    kv_cache_dtype: Annotated[
        str | None, option("NAME", "auto (as the model), fp8, int8_per_token_head and others.")
    ],
) -> Answer:
    """Count the sequences that a server with a paged cache, such as vLLM, can hold next to the weights."""
    from planner import serve

    given = {
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "gpu_memory_utilization": gpu_memory_utilization,
        "block_size": block_size,
        "kv_cache_dtype": kv_cache_dtype,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    result = serve(draft=draft, settings=settings, on_progress=on_progress, **options)
    return result, result.sequences > 0
