"""The published runs of transformers as jobs; benchmarks/accuracy holds the planner against each of them.

benchmarks/published/runs_torch26.csv has the runs; its README names the origin and the loop. They are planned
at 128 tokens, the longest that the loop let through, with the tensors that transformers 4.51.3 saved
(shims/transformers_4_51.py). No figure of these runs enters a replay, and nothing is added for what CUDA
loads lazily, which the measured figures contain. Some batches of the runs had shorter texts than others:
small batches scatter upwards.
"""

from pathlib import Path

from benchmarks.published.outcomes import TORCH, ZERO_GRAD
from planner.jobs import Job, ZeroGrad, resolve_job

CONFIGS = Path(__file__).with_name("hf")


def job_of(run: dict[str, str]) -> Job:
    """Return the job of a published run, with zero_grad before the forward pass if it is not recorded."""
    folder = CONFIGS / run["model"].replace("/", "--")
    eager = run["model"] == "t5-small"  # T5 had no other attention in 4.51
    return resolve_job(
        f"hf:{folder}",
        {},
        model_args=[("attn_implementation", "eager")] if eager else [],
        optimizer=run["optimizer"].lower(),
        zero_grad=ZERO_GRAD.get(run["zero_grad_mode"][:1], ZeroGrad.BEFORE_FORWARD).value,
        steps=4,
        torch=TORCH,
    )
