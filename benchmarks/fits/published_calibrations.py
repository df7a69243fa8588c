"""What calibrations from published runs are worth, and the tables of the RTX 3060 that ship with the package.

Reads benchmarks/published/runs_torch26.csv (its README names the origin and the loop). Of campaign A it takes
each job that ran at four batch sizes or more on one card, fits it, and prints

1. each batch size as the line through the others of its job predicts it, beside the replay alone, and as the
   planner would answer from those others: by their line, or by the replay alone where the line is refused;
2. runs of the same jobs that no fit has seen (their campaign is not recorded), as the fits predict them;
3. the outcomes under allocator caps: whether a "fits" died, and what of a cap is left unused where it lived.

    python -m benchmarks.fits.published_calibrations [--tables FOLDER]

With --tables the fits are written as calibration files. Campaigns are never mixed in one fit. Transformers
are traced as transformers 4.51.3 was (transformers_4_51.py), at the 128 tokens that their loop let through at
most; their texts were shorter in some batches, so that batch sizes of 5 and 10 scatter. Of the RTX 4060 one
job ran at four batch sizes: t5-small.

Campaign A does not record whether zero_grad stood between forward and backward pass or after the step. For
CNNs the replay tells; transformers take the same either way but for a few MiB. Between the two, AdamW peaks
12 to 16 MiB above SGD at batches 300 to 600 of ConvNeXt, since its moments find room where gradients were;
measured are 12 to 14 MiB. After the step it would be 208 MiB at batch 300 and 272 at 400.
"""

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import NormalDist

import numpy as np
from msgspec.structs import replace

from benchmarks.published.allocator import replay_published
from benchmarks.published.outcomes import MIB, RUNS, job_of, set_up_bytes, smallest_cap_mib
from benchmarks.published.shims.transformers_4_51 import as_transformers_4_51
from planner.capture.models.registry import complete_by_library, import_transformers
from planner.capture.session import record
from planner.hardware.calibration.files import Origins, add_points, key_of
from planner.hardware.calibration.fit import LeftOut, fit_points, leave_one_batch_out
from planner.hardware.calibration.model import Fit, Observation, Point, Settings, Versions
from planner.hardware.database import find_device
from planner.hardware.residuals import RunKind, load_residuals
from planner.jobs import Job, Loss, Optimizer, ZeroGrad, freeze
from planner.program import TraceSource
from planner.program.events import Trace
from planner.program.target import Target

CONFIDENCE = 0.99
MOST_UNUSED = 0.05  # of a cap under which a run lived: wanted
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
    """The job of a run of campaign A; see above for its zero_grad."""
    if run["library"] == "torchvision":
        return replace(job_of(dict(run)), zero_grad=ZeroGrad.BEFORE_BACKWARD)
    name, arguments = TRANSFORMERS[run["model"]]
    job = Job(
        model=name,
        model_args=tuple((key, freeze(value)) for key, value in arguments.items()),
        loss=Loss.OUTPUT,
        optimizer=Optimizer(run["optimizer"].lower()),
        steps=4,
    )
    return complete_by_library(job)


def _lacking(run: Run, at: TraceSource) -> int:
    """What stood on the GPU before the first sample: of CNNs model and optimizer (published_outcomes.py)."""
    batch = int(run["batch"])
    return set_up_bytes(at(batch), batch) if run["library"] == "torchvision" else 0


def observation_of(run: Run, lacking_bytes: int) -> Observation:
    """A published run; what it does not tell is None."""
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
    """The jobs of campaign A that can be fitted, with their traces."""
    with RUNS.open(newline="") as file:
        known = [run for run in csv.DictReader(file) if run["library"] in ("torchvision", "transformers")]
    by_job: dict[tuple[Job, str], list[Run]] = defaultdict(list)
    for run in known:
        by_job[published_job(run), run["gpu"]].append(run)
    sweeps = []
    for (job, gpu), runs in by_job.items():
        mine = [run for run in runs if run["campaign"].startswith("A")]
        if len({run["batch"] for run in mine}) < 4:
            continue
        chip = find_device(gpu).target
        at = _tracer(job, chip)
        ordered = sorted(mine, key=lambda run: int(run["batch"]))
        observed = [observation_of(run, _lacking(run, at)) for run in ordered]
        points = tuple(
            Point(one, replay_published(at(one.batch), one.batch).peak_reserved_bytes) for one in observed
        )
        unseen = tuple(run for run in runs if not run["campaign"])
        sweeps.append(Sweep(job, at, points, tuple(mine), unseen))
    return sorted(sweeps, key=lambda sweep: (sweep.job.model, sweep.job.optimizer))


def _tracer(job: Job, chip: Target) -> TraceSource:
    """Takes each batch size once: what kernels take beside tensors follows no line."""
    if job.model.startswith("hf:T5"):  # had no other attention in 4.51
        job = replace(job, model_args=(*job.model_args, ("attn_implementation", "eager")))

    @cache
    def take(batch: int) -> Trace:
        if not job.model.startswith("hf:"):
            return record(job, batch, chip.capability, sm_count=chip.sm_count)
        with as_transformers_4_51():
            return record(job, batch, chip.capability, sm_count=chip.sm_count)

    return take


def name_of(job: Job) -> str:
    return f"{job.model.partition(':')[2][:14]} {job.optimizer}"


def is_cnn(sweep: Sweep) -> bool:
    return sweep.job.model.startswith("torchvision:")


def print_left_out(sweeps: Iterable[Sweep]) -> None:
    """Each batch size as the others of its job predict it."""
    print("1. Each batch size left out of its fit; MiB, errors of calibrated and uncalibrated peak")
    every: list[LeftOut] = []
    transformers: list[LeftOut] = []
    by_job: dict[str, list[LeftOut]] = defaultdict(list)
    kept: list[LeftOut] = []
    answers: dict[str, list[float]] = defaultdict(list)
    for sweep in sweeps:
        lefts = leave_one_batch_out(sweep.points)
        (every if is_cnn(sweep) else transformers).extend(lefts)
        kept += lefts if isinstance(fit_points(sweep.points), Fit) else []
        by_job[name_of(sweep.job)] += lefts
        answers["CNNs" if is_cnn(sweep) else "transformers"] += answered(sweep, lefts)
        for left in lefts:
            plain = left.replayed_bytes / left.measured_bytes - 1
            peaks = (left.measured_bytes, left.calibrated_bytes, left.replayed_bytes)
            measured, calibrated, replayed = (f"{size_bytes / MIB:8.0f}" for size_bytes in peaks)
            head = f"   {name_of(sweep.job):20}{left.batch:5}"
            print(f"{head}{measured}{calibrated} {left.error:+7.1%}{replayed} {plain:+7.1%}")
    sums = {**by_job, "all CNNs": every, "all transformers": transformers, "those with a line": kept}
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
    print(
        "   wanted: CNNs median at most 1 %, 95th percentile at most 4 %; transformers median at most 2.5 %"
    )


def answered(sweep: Sweep, lefts: Iterable[LeftOut]) -> list[float]:
    """The errors of what the planner would answer for each batch size, had it seen the others alone."""
    errors = []
    for left in lefts:
        others = [point for point in sweep.points if point.observation.batch != left.batch]
        has_line = isinstance(fit_points(others), Fit)
        errors.append(left.error if has_line else left.replayed_bytes / left.measured_bytes - 1)
    return errors


def print_fits(sweeps: Iterable[Sweep]) -> dict[Job, Fit]:
    """The fits, and what they say of runs that they have not seen."""
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
                print(f"      unseen: {_told(sweep, fit, run)}")
    return fits


def _told(sweep: Sweep, fit: Fit, run: Run) -> str:
    batch = int(run["batch"])
    peak = float(run["peak_nvml_delta_mib"]) + _lacking(run, sweep.at) / MIB
    replayed = replay_published(sweep.at(batch), batch).peak_reserved_bytes
    told, bound = fit.peak_bytes(replayed) / MIB, fit.bound_bytes(replayed, CONFIDENCE) / MIB
    return (
        f"batch {batch}, measured {peak:.0f}, calibrated {told:.0f} ({told / peak - 1:+.1%}), "
        f"uncalibrated {replayed / MIB / peak - 1:+.1%}, at most {bound:.0f}: "
        + ("held" if peak <= bound else "passed")
    )


def print_caps(sweeps: Iterable[Sweep], fits: Mapping[Job, Fit]) -> None:
    """Outcomes under caps against the planner's answer, and against the fit put under the cap instead."""
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
            wanted = {"planner": raw * max(1.0, 1 + verdicts.location + z * verdicts.scale)}
            if fit is not None:
                wanted["fit under the cap"] = (
                    fit.slope * raw + (fit.overhead_bytes + z * fit.spread_bytes) / MIB
                )
            for cap, what in re.findall(r"(\d+):(OOM|fits)", run["allocator_cap_tests"]):
                for how, need in wanted.items():
                    if what == "OOM":
                        died[how].append(float(cap) >= need)
                    else:
                        unused[how].append(max(0.0, 1 - float(cap) / need))
                        if unused[how][-1] > MOST_UNUSED:
                            wasteful[how].append(
                                f"{name_of(sweep.job)} {run['batch']} under {cap}: {unused[how][-1]:.1%}"
                            )
    for how in died:
        worst = max(unused[how])
        bar = _bar(not any(died[how]) and worst <= MOST_UNUSED)
        print(
            f"   {how:18} {len(died[how])} died, {sum(died[how])} of them promised to fit; "
            f"{len(unused[how])} lived, at most {worst:.1%} of the memory unused, "
            f"over 5 % in {len(wasteful[how])}: {bar}"
        )
        print("".join(f"      {line}\n" for line in wasteful[how]), end="")


def write_tables(sweeps: Iterable[Sweep], folder: Path) -> None:
    """The fits as files."""
    for sweep in sweeps:
        about = ORIGIN if is_cnn(sweep) else f"{ORIGIN}; replayed as transformers 4.51.3 allocates, which ran"
        origins = Origins("published", about, version("torch"))
        add_points(folder, key_of(sweep.points[0].observation), sweep.points, origins, fit_points)


def _bar(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tables", type=Path, help="write the fits into this folder")
    given = parser.parse_args(arguments)
    import_transformers()
    sweeps = read_sweeps()
    print_left_out(sweeps)
    print_caps(sweeps, print_fits(sweeps))
    if given.tables is not None:
        write_tables(sweeps, given.tables)


if __name__ == "__main__":
    main()
