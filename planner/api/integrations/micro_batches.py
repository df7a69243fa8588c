"""Split the samples of an optimizer step into micro-batches that fit.

The split is for transformers' Trainer. The Trainer holds the inputs of all micro-batches of a step on the GPU
at once (transformers/trainer.py, `get_batch_samples`, from a data loader of accelerate that moves each batch
to the device).
"""

from collections.abc import Callable

from planner.api.integrations.batch_choice import BatchSplit, split, split_up
from planner.api.integrations.live_model import BatchChoice

_NEGLIGIBLE_BYTES = 2**20


def split_to_fit(
    samples: int, choose: Callable[[int], BatchChoice], bytes_a_sample: int, multiple: int, grow: bool
) -> tuple[BatchChoice, BatchSplit]:
    """Split `samples` into micro-batches that fit, and return the planned batch and the split.

    `choose` plans a batch with the inputs of a number of micro-batches on the GPU. More micro-batches hold
    more inputs, so that a smaller batch fits: the batch is planned again until further inputs are negligible.
    With `grow` the split may take more samples.
    """
    choice = choose(1)
    if samples <= choice.batch:
        return choice, BatchSplit(choice.batch, 1) if grow else split(samples, choice.batch, multiple)
    divide = split_up if grow else split
    steps = 2
    while True:
        choice = choose(steps)
        chosen = divide(samples, choice.batch, multiple, 2)
        more = max(0, chosen.steps - steps) * chosen.batch * bytes_a_sample
        if more < _NEGLIGIBLE_BYTES:
            return choice, chosen
        steps = chosen.steps


def shortfall(samples: int, chosen: BatchSplit) -> str:
    """Return a sentence on samples that the chosen split leaves out, or ""."""
    if chosen.samples >= samples:
        return ""
    return (
        f"{samples:,} samples in each step of the optimizer become {chosen.batch} x {chosen.steps} = "
        f"{chosen.samples:,}: no divisor of {samples:,} makes good use of the memory"
    )
