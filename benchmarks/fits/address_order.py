"""Infer the order of CUDA's addresses from published peaks; the source of the order in the allocator.

    python -m benchmarks.fits.address_order

Of equal free blocks PyTorch's allocator before 2.12 takes the one at the lowest address. Whether that is the
oldest or the newest segment depends on the place of new ones, which is documented nowhere; from 2.12 on
the oldest segment's is taken, as if addresses rose. Replays all published
runs of benchmarks/published/runs_torch26.csv with addresses that rise and that fall, and prints those on
which the two differ, with the measured peak above each, in MiB. CNNs' measured rise is corrected by the
memory before it (benchmarks/published/outcomes.py); transformers are traced as transformers 4.51.3 was. The
place of zero_grad is not recorded for campaign A and for those without a letter: their CNNs are traced as in
published_calibrations.py, with zero_grad between forward and backward pass in campaign A.
"""

from contextlib import nullcontext

import numpy as np

from benchmarks.published.allocator import replay_published
from benchmarks.published.outcomes import MIB, RUNS, job_of, set_up_bytes
from benchmarks.published.shims.transformers_4_51 import as_transformers_4_51
from benchmarks.published.transformers import job_of as transformer_of
from benchmarks.rows import read_lines
from planner.allocator.replay import replay_trace
from planner.capture.models.registry import import_transformers
from planner.capture.session import record
from planner.hardware.cudnn import PublishedWorkspaces
from planner.hardware.database import find_device
from planner.jobs import ZeroGrad
from planner.program.events import Trace


def main() -> None:
    """Replay both ways and print."""
    import_transformers()
    runs = read_lines(RUNS)
    measured_runs = [run for run in runs if run["peak_nvml_delta_mib"] and run["oom_on_full_gpu"] != "True"]
    differing: list[tuple[float, float]] = []
    print(f"{'model':28} {'optimizer':9} {'batch':>5} {'GPU':8} {'campaign':8} {'rising':>8} {'falling':>8}")
    for run in measured_runs:
        trace, batch = trace_run(run), int(run["batch"])
        set_up = set_up_bytes(trace, batch) if run["library"] == "torchvision" else 0
        measured = float(run["peak_nvml_delta_mib"]) + set_up / MIB
        falling = measured - replay_published(trace, batch).peak_reserved_bytes / MIB
        rising = measured - replay_trace(trace).peak_reserved_bytes / MIB
        if rising != falling:
            differing.append((rising, falling))
            name = run["model"].partition("(")[0]
            print(
                f"{name:28} {run['optimizer']:9} {batch:5} {run['gpu'][:8]} {run['campaign'][:1] or '-':8} "
                f"{rising:8.0f} {falling:8.0f}"
            )
    table = np.abs(np.array(differing))
    closer = int((table[:, 1] < table[:, 0]).sum())
    print(
        f"{len(measured_runs)} runs, {len(table)} differ; falling is closer in {closer}; "
        f"median distance {np.median(table[:, 0]):.0f} rising, {np.median(table[:, 1]):.0f} falling; "
        f"within 40 MiB {(table[:, 0] <= 40).sum()} rising, {(table[:, 1] <= 40).sum()} falling"
    )


def trace_run(run: dict[str, str]) -> Trace:
    """Record the run's trace on its card."""
    chip = find_device(run["gpu"]).target
    is_cnn = run["library"] == "torchvision"
    job = job_of(run) if is_cnn else transformer_of(run)
    if is_cnn and run["campaign"].startswith("A"):
        job = job.replace(zero_grad=ZeroGrad.BEFORE_BACKWARD)
    with nullcontext() if is_cnn else as_transformers_4_51():
        return record(
            job, int(run["batch"]), chip.capability,
            sm_count=chip.sm_count, conv_workspace_query=PublishedWorkspaces(),
        )  # fmt: skip


if __name__ == "__main__":
    main()
