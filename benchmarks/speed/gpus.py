"""Time `planner gpus`, which plans every card of the database, against `planner max-batch` for one.

    python -m benchmarks.speed.gpus [--check] [MODEL ...]

Runs both commands in turn, each in a fresh process, and prints the best of three of each and their ratio:
traced anew, where for vit_b_16 it may be 1.5, and from cached traces, where one card needs hardly any time.
Then the seconds of the table, and with `--check` the cards whose largest batch is not that of `max-batch`,
with the outcomes of traces of their own for both answers.
"""

import subprocess
import sys
from time import perf_counter

from planner import gpus, max_batch
from planner.allocator.replay import replay_trace
from planner.api.request.request import make_job
from planner.capture.models.registry import construct_model, find_constructor
from planner.capture.session import record
from planner.planning.search.fleet import DeviceFit

REPEATS = 3


def seconds(*arguments: str) -> float:
    """Return the wall time of one command line."""
    start = perf_counter()
    command = [sys.executable, "-m", "planner", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - start


def report(model: str) -> None:
    """Time both commands, in turn, so that a busy machine slows both."""
    for source, options in (("traced anew", ["--no-cache"]), ("from cached traces", [])):
        one_card, all_cards = [], []
        for _ in range(REPEATS):
            one_card.append(seconds("max-batch", "--model", model, "--gpu", "4090", *options))
            all_cards.append(seconds("gpus", "--model", model, *options))
        one, every = min(one_card), min(all_cards)
        print(f"{model}, {source}: one card {one:.2f} s, all {every:.2f} s, ratio {every / one:.2f}")
    result = gpus(model)
    spent = result.table.seconds
    print(f"  {len(result.fits)} cards; {spent.trace:.2f} s of that tracing, {spent.replay:.2f} s replaying")


def check(model: str) -> None:
    """Hold each card against `max_batch`, and both against traces of their own if they differ."""
    largest = {}
    different = 0
    for fit in gpus(model).fits:
        key = (fit.budget.device.target, fit.budget.limits)
        if key in largest:
            continue
        alone = largest[key] = max_batch(model, gpu=fit.budget.device).max_batch
        if alone != fit.max_batch:
            different += 1
            own_outcomes = verdicts(model, fit, alone)
            print(f"  {fit.budget.device.name}: max-batch {alone}, gpus {fit.max_batch}; {own_outcomes}")
    print(f"  {len(largest)} cards, {different} different")


def verdicts(model: str, fit: DeviceFit, alone: int) -> str:
    """Return the outcomes of both answers and of their successors, by traces of their own."""
    job, _, _ = make_job(model, {})
    constructor = find_constructor(job)
    sizes = sorted({alone, alone + 1, fit.max_batch, fit.max_batch + 1})
    chip = fit.budget.device.target
    outcomes = []
    for size in sizes:
        trace = record(
            job,
            size,
            chip.capability,
            lambda job: construct_model(job, constructor),
            sm_count=chip.sm_count,
        )
        outcomes.append(f"{size} {replay_trace(trace, fit.budget.limits).outcome}")
    return ", ".join(outcomes)


def main() -> None:
    """Print the report of each model."""
    models = [argument for argument in sys.argv[1:] if not argument.startswith("--")] or ["vit_b_16"]
    for model in models:
        report(model)
        if "--check" in sys.argv:
            check(model)


if __name__ == "__main__":
    main()
