"""Measure the time of plans of large language models, and the memory that the planner itself needs.

    python -m benchmarks.speed.llm

Each case runs in a process of its own: `planner max-batch` on 2048 tokens in pure bf16 on as many bytes as
eight H200 have, so that the 70B model fits; the plan is for one process all the same. Prints the seconds
after the imports and the peak of resident memory. Other work on the machine counts into the seconds.
"""

import json
import resource
import subprocess
import sys

from planner.api.max_batch import MaxBatchResult, max_batch

GPU_MIB = 1_150_000
CASES = [
    (model, mode, checkpoint)
    for model in ("llama_8b", "llama_70b")
    for mode, checkpoint in (("train", "none"), ("train", "blocks"), ("infer", "none"))
]


def run_case(model: str, mode: str, checkpoint: str) -> None:
    """Plan one case in this process and print its figures as JSON."""
    plan = max_batch(
        model,
        gpu_mib=GPU_MIB,
        input="2048:int64",
        mode=mode,
        checkpoint=checkpoint,
        optimizer="adamw",
        precision="bf16",
    )
    assert isinstance(plan, MaxBatchResult)
    seconds = plan.plan.seconds
    figures = {
        "import": plan.import_seconds,
        "trace": seconds.trace,
        "replay": seconds.replay,
        "batch": plan.max_batch,
        "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(figures))


def main() -> None:
    """Run all cases and print a table."""
    print(
        f"{'model':10} {'mode':6} {'checkpoint':10} {'import s':>8} {'trace s':>8} {'replay s':>8} "
        f"{'batch':>6} RSS MiB"
    )
    for case in CASES:
        done = subprocess.run([sys.executable, __file__, *case], capture_output=True, text=True)
        if done.returncode:
            print(" ".join(case), done.stderr.strip().splitlines()[-1])
            continue
        figures = json.loads(done.stdout.splitlines()[-1])
        model, mode, checkpoint = case
        print(
            f"{model:10} {mode:6} {checkpoint:10} {figures['import']:8.2f} {figures['trace']:8.2f} "
            f"{figures['replay']:8.2f} {figures['batch']:6} {figures['resident_mib']:7.0f}",
            flush=True,
        )


if __name__ == "__main__":
    run_case(*sys.argv[1:]) if len(sys.argv) > 1 else main()
