"""Count the searches in which a larger batch fits above one that does not, and those that miss it.

    python -m benchmarks.fits.search_neighbours [CAPACITIES]

For each model and optimizer, takes so many (50) random capacities between 1.02 and 2.2 times the memory of
batch 1, replays every batch size up to a third above the last one that fits, and counts the searches that
miss the largest: by galloping and bisection alone, and by the search with its neighbours.
"""

import random
import sys

from planner.allocator.config import MIB, MemoryLimits
from planner.allocator.replay import replay_trace
from planner.capture.session import record
from planner.jobs import Job, Optimizer, TensorSpec
from planner.planning.search.boundary import _boundary, largest
from planner.program.events import Outcome
from planner.program.extrapolation.fit import fit_traces
from planner.program.program import Program

MODELS = ("alexnet", "vgg11", "vgg16_bn", "resnet18", "resnet50", "mobilenet_v3_small", "vit_b_16")
OPTIMIZERS = (Optimizer.SGD, Optimizer.ADAM)
AMPERE = (8, 6)
MOST_BATCHES = 400


def outcomes_of(program: Program, limits: MemoryLimits) -> dict[int, Outcome]:
    """Return the outcome of every batch size up to 35 % or 12 above the last one that fits."""
    outcomes: dict[int, Outcome] = {}
    last = batch = 0
    while batch < min(MOST_BATCHES, max(1.35 * last, last + 12)):
        batch += 1
        outcomes[batch] = replay_trace(program.instantiate(batch), limits).outcome
        if outcomes[batch] is not Outcome.DOES_NOT_FIT:
            last = batch
    return outcomes


def main() -> None:
    """Print one line per model and optimizer."""
    capacities = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    rng = random.Random(1)
    for model in MODELS:
        for optimizer in OPTIMIZERS:
            image, classes = TensorSpec((3, 224, 224)), TensorSpec((), "int64")
            job = Job.create(f"torchvision:{model}", inputs=(image,), target=classes, optimizer=optimizer)
            program = fit_traces(record(job, 2, AMPERE), record(job, 3, AMPERE))
            least_bytes = replay_trace(program.instantiate(1)).peak_reserved_bytes
            bisected = missed = probes = 0
            for _ in range(capacities):
                limits = MemoryLimits(int(least_bytes * rng.uniform(1.02, 2.2)))
                outcomes = outcomes_of(program, limits)

                def outcome(batch: int, outcomes: dict[int, Outcome] = outcomes) -> Outcome:
                    return outcomes.get(batch, Outcome.DOES_NOT_FIT)

                def fits(batch: int, outcomes: dict[int, Outcome] = outcomes) -> bool:
                    return outcomes.get(batch, Outcome.DOES_NOT_FIT) is not Outcome.DOES_NOT_FIT

                best = max(filter(fits, outcomes), default=0)
                search = largest(outcome, MOST_BATCHES)
                bisected += _boundary(fits, 0, MOST_BATCHES) != best
                missed += search.largest != best
                probes += len(search.probes)
            print(
                f"{model:20} {optimizer:5} {capacities} capacities from {least_bytes / MIB * 1.02:6.0f} MiB: "
                f"missed by bisection {bisected:3}, with neighbours {missed:3}; "
                f"{probes / capacities:4.1f} probes"
            )


if __name__ == "__main__":
    main()
