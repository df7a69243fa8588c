"""Evaluate calibrations from published runs, and write the bundled tables of the RTX 3060.

Reads benchmarks/published/runs_torch26.csv (its README names the origin and the loop). Of campaign A it takes
each job that ran at four batch sizes or more on one card, fits it, and prints

1. each batch size as the line through the others of its job predicts it, beside the replay alone, and as the
   planner would answer from those others: by their line, or by the replay alone if the line is refused;
2. runs of the same jobs that no fit has seen (their campaign is not recorded), as the fits predict them;
3. the outcomes under allocator caps: "fits" that died, and the unused part of a cap of those that lived.

    python -m benchmarks.fits.published_calibrations [--tables FOLDER]

With --tables the fits are written as calibration files. Campaigns are never mixed in one fit. Transformers
are traced as transformers 4.51.3 was (transformers_4_51.py), at the 128 tokens that their loop let through at
most; their texts were shorter in some batches, so that batch sizes of 5 and 10 scatter. Of the RTX 4060 one
job ran at four batch sizes: t5-small.

Campaign A does not record whether zero_grad stood between forward and backward pass or after the step. For
CNNs the replay decides; transformers take the same either way but for a few MiB. Between the two, AdamW peaks
12 to 16 MiB above SGD at batches 300 to 600 of ConvNeXt, since its moments find room where gradients were;
measured are 12 to 14 MiB. After the step it would be 208 MiB at batch 300 and 272 at 400.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks.published.allocator import replay_published
from benchmarks.published.outcomes import MIB, RUNS, job_of, set_up_bytes, smallest_cap_mib
from benchmarks.published.shims.transformers_4_51 import as_transformers_4_51
from benchmarks.rows import read_lines
from planner.capture.models.registry import complete_by_library, import_transformers
from planner.capture.session import record
from planner.hardware.calibration.files import Origins, add_points, key_of
from planner.hardware.calibration.fit import LeftOut, fit_points, leave_one_batch_out
from planner.hardware.calibration.model import Fit, Observation, Point, Settings, Versions
from planner.hardware.cudnn import PublishedWorkspaces
from planner.hardware.database import find_device
from planner.hardware.residuals import RunKind, load_residuals
from planner.jobs import Job, Loss, Optimizer, ZeroGrad, freeze
from planner.program import TraceSource
from planner.program.events import Trace
from planner.program.target import Target

CONFIDENCE = 0.99
MOST_UNUSED = 0.05  # of a cap under which a run lived: the bar
ORIGIN = (
    "Stone-ResearchLife/xMem (Middleware 2025), campaign A, files of 2025-05-06; process peak by NVML over "
    "its level after the CUDA context was made, to which for CNNs the replayed memory of model and optimizer "
    "is added, since that level seems to hold it: the overhead is what lies on top of the reserved peak, "
    "WITHOUT the context; "
    "zero_grad between forward and backward pass, which the record leaves open and the replay decides"
)
# The published configurations as arguments of transformers' own, so that no folder is needed to name them.
TRANSFORMERS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "t5-small": ("hf:T5ForConditionalGeneration", {}),
    "EleutherAI/gpt-neo-125M": (
        "hf:GPTNeoForCausalLM",
        {
            "hidden_size": 768,
            "num_layers": 12,
            "num_heads": 12,
            "attention_types": [[["global", "local"], 6]],
        },
    ),
    "cerebras/Cerebras-GPT-111M": (
        "hf:GPT2LMHeadModel",
        {
            "n_layer": 10,
            "n_inner": 3072,
            "n_positions": 2048,
            "activation_function": "gelu",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
}
Run = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sweep:
    """One job on one card at several batch sizes."""

    job: Job
    at: TraceSource
    points: tuple[Point, ...]
    runs: tuple[Run, ...]  # with their outcomes under caps
    unseen: tuple[Run, ...]  # of the same job, of a campaign that is not recorded


def published_job(run: Run) -> Job:
    """Return the job of a run of campaign A; see above for its zero_grad."""
    if run["library"] == "torchvision":
        return job_of(dict(run)).replace(zero_grad=ZeroGrad.BEFORE_BACKWARD)
    name, arguments = TRANSFORMERS[run["model"]]
    job = Job.create(
        model=name,
        model_args=tuple((key, freeze(value)) for key, value in arguments.items()),
        loss=Loss.OUTPUT,
        optimizer=Optimizer(run["optimizer"].lower()),
        steps=4,
    )
    return complete_by_library(job)


def _lacking(run: Run, at: TraceSource) -> int:
    """Return the bytes before the first sample: of CNNs model and optimizer (see `set_up_bytes`)."""
    batch = int(run["batch"])
    return set_up_bytes(at(batch), batch) if run["library"] == "torchvision" else 0


def observation_of(run: Run, lacking_bytes: int) -> Observation:
    """Return a published run as an observation, with None for what is not published."""
    rise = run["peak_nvml_delta_mib"]
    died = run["oom_on_full_gpu"] == "True"
    return Observation(
        job=published_job(run),
        batch=int(run["batch"]),
        gpu=run["gpu"],
        versions=Versions(
            torch=run["torch_version"].split()[0],
            cuda="12.4",
            cudnn="9",
            driver=None,
            capability=find_device(run["gpu"]).capability,
            torch_total_bytes=round(float(run["gpu_torch_total_mib"]) * MIB),
            nvml_total_bytes=None,
        ),
        settings=Settings(),
        peak_allocated_bytes=None,
        peak_reserved_bytes=None,
        end_allocated_bytes=None,
        process_peak_bytes=None,
        context_before_bytes=None,
        context_after_bytes=None,
        retries=None,
        oom=died,
        source="published",
        about=run["source"],
        when="2025-05-06",
        process_rise_bytes=round(float(rise) * MIB) + lacking_bytes if rise else None,
    )


def read_sweeps() -> list[Sweep]:
    """Return the jobs of campaign A that can be fitted, with their traces."""
    published = [run for run in read_lines(RUNS) if run["library"] in ("torchvision", "transformers")]
    by_job: dict[tuple[Job, str], list[Run]] = defaultdict(list)
    for run in published:
        by_job[published_job(run), run["gpu"]].append(run)
    sweeps = []
    for (job, gpu), runs in by_job.items():
        campaign_runs = [run for run in runs if run["campaign"].startswith("A")]
        if len({run["batch"] for run in campaign_runs}) < 4:
            continue
        chip = find_device(gpu).target
        at = _tracer(job, chip)
        ordered = sorted(campaign_runs, key=lambda run: int(run["batch"]))
        observed = [observation_of(run, _lacking(run, at)) for run in ordered]
        points = tuple(
            Point(observation, replay_published(at(observation.batch), observation.batch).peak_reserved_bytes)
            for observation in observed
        )
        unseen = tuple(run for run in runs if not run["campaign"])
        sweeps.append(Sweep(job, at, points, tuple(campaign_runs), unseen))
    return sorted(sweeps, key=lambda sweep: (sweep.job.model.name, sweep.job.loop.optimizer))


def _tracer(job: Job, chip: Target) -> TraceSource:
    """Return a source that traces each batch size once: workspaces of kernels follow no line."""
    if job.model.name.startswith("hf:T5"):  # had no other attention in 4.51
        job = job.replace(model_args=(*job.model.args, ("attn_implementation", "eager")))

    @cache
    def trace(batch: int) -> Trace:
        query = PublishedWorkspaces()
        with as_transformers_4_51() if job.model.name.startswith("hf:") else nullcontext():
            return record(job, batch, chip.capability, sm_count=chip.sm_count, conv_workspace_query=query)

    return trace


def name_of(job: Job) -> str:
    return f"{job.model.name.partition(':')[2][:14]} {job.loop.optimizer}"


def is_cnn(sweep: Sweep) -> bool:
    return sweep.job.model.name.startswith("torchvision:")


def print_left_out(sweeps: Iterable[Sweep]) -> None:
    """Print each batch size as the others of its job predict it."""
    print("1. Each batch size left out of its fit; MiB, errors of calibrated and uncalibrated peak")
    every: list[LeftOut] = []
    transformers: list[LeftOut] = []
    by_job: dict[str, list[LeftOut]] = defaultdict(list)
    with_line: list[LeftOut] = []
    answers: dict[str, list[float]] = defaultdict(list)
    for sweep in sweeps:
        lefts = leave_one_batch_out(sweep.points)
        (every if is_cnn(sweep) else transformers).extend(lefts)
        with_line += lefts if isinstance(fit_points(sweep.points), Fit) else []
        by_job[name_of(sweep.job)] += lefts
        answers["CNNs" if is_cnn(sweep) else "transformers"] += answered(sweep, lefts)
        for left in lefts:
            plain = left.replayed_bytes / left.measured_bytes - 1
            peaks = (left.measured_bytes, left.calibrated_bytes, left.replayed_bytes)
            measured, calibrated, replayed = (f"{size_bytes / MIB:8.0f}" for size_bytes in peaks)
            head = f"   {name_of(sweep.job):20}{left.batch:5}"
            print(f"{head}{measured}{calibrated} {left.error:+7.1%}{replayed} {plain:+7.1%}")
    sums = {**by_job, "all CNNs": every, "all transformers": transformers, "those with a line": with_line}
    print(
        f"   {'absolute error':20}{'runs':>5}{'median':>9}{'95 %':>8}   uncalibrated{'median':>8}{'95 %':>8}"
    )
    for name, lefts in sums.items():
        ours = np.abs([left.error for left in lefts])
        plain_errors = np.abs([left.replayed_bytes / left.measured_bytes - 1 for left in lefts])
        print(
            f"   {name:20}{len(lefts):5}{np.median(ours):9.1%}{np.quantile(ours, 0.95):8.1%}"
            f"{np.median(plain_errors):23.1%}{np.quantile(plain_errors, 0.95):8.1%}"
        )
    bars = {"CNNs": (0.01, 0.04), "transformers": (0.025, 1.0)}
    for name, errors in answers.items():
        median, high = np.quantile(np.abs(errors), [0.5, 0.95])
        reached = _bar(median <= bars[name][0] and high <= bars[name][1])
        print(
            f"   {name}, as the planner answers: median {median:.2%}, 95th percentile {high:.1%}: {reached}"
        )
    print("   bars: CNNs median at most 1 %, 95th percentile at most 4 %; transformers median at most 2.5 %")


def answered(sweep: Sweep, lefts: Iterable[LeftOut]) -> list[float]:
    """Return the errors of the planner's answers for each batch size, calibrated by the others alone."""
    errors = []
    for left in lefts:
        others = [point for point in sweep.points if point.observation.batch != left.batch]
        has_line = isinstance(fit_points(others), Fit)
        errors.append(left.error if has_line else left.replayed_bytes / left.measured_bytes - 1)
    return errors


def print_fits(sweeps: Iterable[Sweep]) -> dict[Job, Fit]:
    """Print the fits, and their predictions for runs that they have not seen."""
    print("\n2. The fits, and runs of the same jobs that they have not seen")
    fits = {}
    for sweep in sweeps:
        fit = fit_points(sweep.points)
        if not isinstance(fit, Fit):
            print(f"   {name_of(sweep.job):20} refused: {fit.reason}")
            continue
        fits[sweep.job] = fit
        off = f", off the line: {', '.join(map(str, fit.outliers))}" if fit.outliers else ""
        print(
            f"   {name_of(sweep.job):20} {fit.overhead_bytes / MIB:6.0f} MiB + {fit.slope:.4f} x replay, "
            f"spread {fit.spread_bytes / MIB:.0f} MiB, {fit.points} runs, "
            f"leverage up to {fit.highest_leverage:.2f}{off}"
        )
        for run in sweep.unseen:
            if run["oom_on_full_gpu"] != "True":
                print(f"      unseen: {_prediction(sweep, fit, run)}")
    return fits


def _prediction(sweep: Sweep, fit: Fit, run: Run) -> str:
    batch = int(run["batch"])
    peak = float(run["peak_nvml_delta_mib"]) + _lacking(run, sweep.at) / MIB
    replayed = replay_published(sweep.at(batch), batch).peak_reserved_bytes
    predicted, bound = fit.peak_bytes(replayed) / MIB, fit.bound_bytes(replayed, CONFIDENCE) / MIB
    return (
        f"batch {batch}, measured {peak:.0f}, calibrated {predicted:.0f} ({predicted / peak - 1:+.1%}), "
        f"uncalibrated {replayed / MIB / peak - 1:+.1%}, at most {bound:.0f}: "
        + ("held" if peak <= bound else "passed")
    )


def print_caps(sweeps: Iterable[Sweep], fits: Mapping[Job, Fit]) -> None:
    """Print outcomes under caps against the planner's answer, and against the fit put under the cap."""
    print(f"\n3. Outcomes under allocator caps at confidence {CONFIDENCE:g}, of the runs fitted and unseen")
    z = NormalDist().inv_cdf(CONFIDENCE)
    died: dict[str, list[bool]] = defaultdict(list)
    unused: dict[str, list[float]] = defaultdict(list)
    wasteful: dict[str, list[str]] = defaultdict(list)
    for sweep in sweeps:
        fit = fits.get(sweep.job)
        for run in (*sweep.runs, *sweep.unseen):
            raw = smallest_cap_mib(sweep.at(int(run["batch"])), int(run["batch"]))
            verdicts = (
                load_residuals().kinds[RunKind.CONVOLUTIONS if is_cnn(sweep) else RunKind.TEXTS].verdicts
            )
            needs = {"planner": raw * max(1.0, 1 + verdicts.location + z * verdicts.scale)}
            if fit is not None:
                needs["fit under the cap"] = (
                    fit.slope * raw + (fit.overhead_bytes + z * fit.spread_bytes) / MIB
                )
            for cap, outcome in re.findall(r"(\d+):(OOM|fits)", run["allocator_cap_tests"]):
                for method, need in needs.items():
                    if outcome == "OOM":
                        died[method].append(float(cap) >= need)
                    else:
                        unused[method].append(max(0.0, 1 - float(cap) / need))
                        if unused[method][-1] > MOST_UNUSED:
                            wasteful[method].append(
                                f"{name_of(sweep.job)} {run['batch']} under {cap}: {unused[method][-1]:.1%}"
                            )
    for method in died:
        worst = max(unused[method])
        bar = _bar(not any(died[method]) and worst <= MOST_UNUSED)
        print(
            f"   {method:18} {len(died[method])} died, {sum(died[method])} of them promised to fit; "
            f"{len(unused[method])} lived, at most {worst:.1%} of the memory unused, "
            f"over 5 % in {len(wasteful[method])}: {bar}"
        )
        print("".join(f"      {line}\n" for line in wasteful[method]), end="")


def write_tables(sweeps: Iterable[Sweep], folder: Path) -> None:
    """Write the fits as files."""
    for sweep in sweeps:
        about = ORIGIN if is_cnn(sweep) else f"{ORIGIN}; replayed as transformers 4.51.3 allocates, which ran"
        origins = Origins("published", about, version("torch"))
        add_points(folder, key_of(sweep.points[0].observation), sweep.points, origins, fit_points)


def _bar(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tables", type=Path, help="write the fits into this folder")
    options = parser.parse_args(arguments)
    import_transformers()
    sweeps = read_sweeps()
    print_left_out(sweeps)
    print_caps(sweeps, print_fits(sweeps))
    if options.tables is not None:
        write_tables(sweeps, options.tables)


if __name__ == "__main__":
    main()
