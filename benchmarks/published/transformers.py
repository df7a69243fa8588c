"""Compare our replays with published runs of transformers, beside systems that estimated the same runs.

Reads benchmarks/published/runs_torch26.csv (its README names the origin and the loop) and traces each
transformer of it at 128 tokens, the longest that its loop let through, with the tensors that transformers
4.51.3 saved (shims/transformers_4_51.py). Prints the signed error of our peak reserved, then medians. No
figure of these runs enters a replay, and nothing is added for what CUDA loads lazily, which the measured
figures contain. Some batches of the runs had shorter texts than others: small batches scatter upwards.

    python -m benchmarks.published.transformers [--installed]

With --installed the traces are those of the installed transformers as it is, which shows the difference of
the versions.
"""

import argparse
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.published.allocator import replay_published
from benchmarks.published.outcomes import MIB, RUNS, TORCH, ZERO_GRAD
from benchmarks.published.shims.transformers_4_51 import as_transformers_4_51
from benchmarks.rows import read_lines
from planner.capture.models.registry import import_transformers
from planner.capture.session import record
from planner.hardware.database import find_device
from planner.jobs import Job, ZeroGrad, resolve_job
from planner.program.target import Target

CONFIGS = Path(__file__).with_name("hf")
OTHERS = ("xmem", "dnnmem", "schedtune", "llmem")
Versions = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Compared:
    """A published run with our figure and those of the other systems, in MiB."""

    run: dict[str, str]
    measured_mib: float
    reserved_mib: float

    @property
    def error(self) -> float:
        """Our error, signed, as a share of the measured peak."""
        return self.reserved_mib / self.measured_mib - 1

    def error_of(self, system: str) -> float | None:
        """Return another system's error; None if it published nothing for this run."""
        text = self.run[f"{system}_estimate_mib"]
        return float(text) / self.measured_mib - 1 if text else None


def job_of(run: dict[str, str], *, as_published: bool) -> Job:
    """Return the job of a published run, with zero_grad before the forward pass if it is not recorded."""
    folder = CONFIGS / run["model"].replace("/", "--")
    eager = as_published and run["model"] == "t5-small"  # T5 had no other attention in 4.51
    return resolve_job(
        f"hf:{folder}",
        {},
        model_args=[("attn_implementation", "eager")] if eager else [],
        optimizer=run["optimizer"].lower(),
        zero_grad=ZERO_GRAD.get(run["zero_grad_mode"][:1], ZeroGrad.BEFORE_FORWARD).value,
        steps=4,
        torch=TORCH,
    )


def compare(runs: Iterable[dict[str, str]], versions: Versions, *, as_published: bool) -> list[Compared]:
    """Replay all runs that show a peak, without those that died on the whole card."""

    @cache
    def reserved_mib(job: Job, batch: int, chip: Target) -> float:
        with versions():
            trace = record(job, batch, chip.capability, sm_count=chip.sm_count)
        return replay_published(trace, batch).peak_reserved_bytes / MIB

    return [
        Compared(
            run,
            float(run["peak_nvml_delta_mib"]),
            reserved_mib(
                job_of(run, as_published=as_published), int(run["batch"]), find_device(run["gpu"]).target
            ),
        )
        for run in runs
        if run["peak_nvml_delta_mib"] and run["oom_on_full_gpu"] != "True"
    ]


def summary(title: str, errors: list[float]) -> str:
    """Format the medians of signed and absolute errors, and the spread."""
    absolute = np.abs(errors)
    return (
        f"{title:32} {len(errors):4}  median {np.median(errors):+7.2%}  absolute {np.median(absolute):7.2%}  "
        f"90 % within {np.quantile(absolute, 0.9):7.2%}  worst {max(errors, key=abs):+8.2%}"
    )


def main() -> None:
    """Compare and print."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--installed", action="store_true", help="transformers as it is installed")
    installed = parser.parse_args().installed
    import_transformers()
    runs = [run for run in read_lines(RUNS) if run["library"] == "transformers"]
    compared = compare(runs, nullcontext if installed else as_transformers_4_51, as_published=not installed)
    print(
        f"{'model':27} {'optimizer':9} {'batch':>5} {'GPU':8} {'campaign':8} {'measured':>8} "
        f"{'reserved':>8} {'error':>8}" + "".join(f"{name:>10}" for name in OTHERS)
    )
    for item in compared:
        run = item.run
        others = [item.error_of(name) for name in OTHERS]
        print(
            f"{run['model']:27} {run['optimizer']:9} {run['batch']:>5} {run['gpu'][:8]} "
            f"{run['campaign'][:1] or '-':8} "
            f"{item.measured_mib:8.0f} {item.reserved_mib:8.0f} {item.error:+8.2%}"
            + "".join(f"{'' if error is None else f'{error:+.2%}':>10}" for error in others)
        )
    print()
    for model in sorted({item.run["model"] for item in compared}):
        for optimizer in ("AdamW", "SGD"):
            kind = (model, optimizer)
            errors = [item.error for item in compared if (item.run["model"], item.run["optimizer"]) == kind]
            print(summary(f"{model} {optimizer}", errors))
    print(summary("all", [item.error for item in compared]))
    for name in OTHERS:
        estimated = [item for item in compared if item.error_of(name) is not None]
        if estimated:
            print(summary(f"{name}", [item.error_of(name) or 0.0 for item in estimated]))
            print(summary("  ours, on the same runs", [item.error for item in estimated]))


if __name__ == "__main__":
    main()
