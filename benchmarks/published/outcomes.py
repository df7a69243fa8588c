"""Compare our replays with published runs of CNNs, run by run; benchmarks/accuracy reports on all of them.

Reads benchmarks/published/runs_torch26.csv (its README names the origin and the loop), traces each CNN of
it, and prints (1) the caps under which the run died or lived over the smallest cap that our replay fits,
and (2) the quantiles of measured process peak over replayed reserved peak. One
workspace of the replay is fitted to some of these peaks (benchmarks/fits/convolution_workspaces.py).

The measured figure is a rise over the first sample, and of CNNs the first sample seems to come after the
model and the optimizer stand on the GPU: with their memory counted, ConvNeXt-Tiny's and ResNet-101's peaks
come out some 110 and 170 MiB too high throughout, as large as their weights, and twice that under Adagrad,
which makes its state when it is constructed. So the memory that the replay has reserved after the set-up is
added to the measured rise.

    python -m benchmarks.published.outcomes
"""

import re
from itertools import takewhile
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from benchmarks.published.allocator import replay_published
from benchmarks.rows import read_lines
from planner.capture.session import record
from planner.hardware.cudnn import PublishedWorkspaces
from planner.hardware.database import find_device
from planner.jobs import PUBLISHED, Job, Optimizer, ZeroGrad, parse_tensor_spec
from planner.program.events import Outcome, Phase, PhaseStart, Trace
from planner.program.kernels.convolution import ConvWorkspaceQuery

RUNS = Path(__file__).parent / "runs_torch26.csv"
TORCH = "2.6"  # that ran
MIB = 2**20
AMPERE = (8, 6)
ZERO_GRAD = {"0": ZeroGrad.BEFORE_FORWARD, "1": ZeroGrad.BEFORE_BACKWARD, "2": ZeroGrad.AFTER_STEP}


def job_of(run: dict[str, str]) -> Job:
    """Return the job of a published run, with zero_grad before the forward pass if it is not recorded."""
    mnasnet = run["model"].startswith("MNASNet")
    return Job.create(
        model="torchvision:mnasnet1_0" if mnasnet else f"torchvision:{run['model']}",
        model_args=(("num_classes", 10),) if mnasnet or run["model"].startswith("mobilenet_v3") else (),
        inputs=(parse_tensor_spec(run["input_shape"]),),
        target=parse_tensor_spec("scalar:int64"),
        optimizer=Optimizer(run["optimizer"].lower()),
        zero_grad=ZERO_GRAD.get(run["zero_grad_mode"][:1], ZeroGrad.BEFORE_FORWARD),
        steps=4,
        torch=TORCH,
        cudnn=PUBLISHED,  # torch 2.6 with cuDNN 9.1
    )


def trace_run(run: dict[str, str], query: ConvWorkspaceQuery | None = None) -> Trace:
    """Record the run's trace on its card; `query` answers for convolutions in place of the fitted term."""
    chip = find_device(run["gpu"]).target
    return record(
        job_of(run), int(run["batch"]), chip.capability,
        sm_count=chip.sm_count, conv_workspace_query=query or PublishedWorkspaces(),
    )  # fmt: skip


def set_up_bytes(trace: Trace, batch: int) -> int:
    """Return the memory reserved once the model and the optimizer stand on the GPU."""
    events = takewhile(
        lambda event: not isinstance(event, PhaseStart) or event.phase is Phase.SETUP, trace.events
    )
    return replay_published(replace(trace, events=tuple(events)), batch).peak_reserved_bytes


def smallest_cap_mib(trace: Trace, batch: int) -> int:
    """Return the smallest memory in MiB within which the replay does not fail, to 1 MiB."""
    low, high = 0, replay_published(trace, batch).peak_reserved_bytes // MIB + 2
    while high - low > 1:
        middle = (low + high) // 2
        fails = replay_published(trace, batch, middle * MIB).outcome is Outcome.DOES_NOT_FIT
        low, high = (middle, high) if fails else (low, middle)
    return high


def main() -> None:
    runs = [run for run in read_lines(RUNS) if run["library"] == "torchvision"]
    died: list[float] = []
    lived: list[float] = []
    ratios: list[float] = []
    print(
        f"{'model':14} {'optimizer':9} {'batch':>5} {'measured':>9} {'set-up':>6} {'replayed':>9} "
        f"{'ratio':>6}  cap / ours"
    )
    for run in runs:
        batch = int(run["batch"])
        trace = trace_run(run)
        set_up = set_up_bytes(trace, batch) / MIB
        ours = smallest_cap_mib(trace, batch)
        reserved = replay_published(trace, batch).peak_reserved_bytes / MIB
        caps = re.findall(r"(\d+):(OOM|fits)", run["allocator_cap_tests"])
        died += [float(cap) / ours for cap, outcome in caps if outcome == "OOM"]
        lived += [float(cap) / ours for cap, outcome in caps if outcome == "fits"]
        ratio = ""
        if run["peak_nvml_delta_mib"] and run["oom_on_full_gpu"] != "True":
            ratios.append((float(run["peak_nvml_delta_mib"]) + set_up) / reserved)
            ratio = f"{ratios[-1]:.3f}"
        cap_ratios = " ".join(f"{outcome}@{float(cap) / ours:.3f}" for cap, outcome in caps)
        name = run["model"].split("(")[0]
        peak = run["peak_nvml_delta_mib"]
        print(
            f"{name:14} {run['optimizer']:9} {batch:5} {peak:>9} {set_up:6.0f} {reserved:9.0f} "
            f"{ratio:>6}  {cap_ratios}"
        )
    wrong = [f"died at {x:.3f}" for x in died if x >= 1] + [f"lived at {x:.3f}" for x in lived if x < 1]
    print(f"\n{len(died) + len(lived)} outcomes under caps, wrong: {', '.join(wrong) or 'none'}")
    print(f"highest cap that died / ours: {max(died):.4f}; lowest that lived / ours: {min(lived):.4f}")
    quantiles = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
    print(f"{len(ratios)} peaks, measured rise and set-up / replayed reserved, by quantile:")
    print(
        "  ".join(
            f"{q:g}: {value:.4f}" for q, value in zip(quantiles, np.quantile(ratios, quantiles), strict=True)
        )
    )
    print(f"median absolute error {np.median(np.abs(1 / np.array(ratios) - 1)):.2%}")


if __name__ == "__main__":
    main()
