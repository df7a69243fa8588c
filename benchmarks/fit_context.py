"""Where the constants of `planner/context.py` come from; prints them, and published contexts beside it.

    python benchmarks/fit_context.py

Each figure is memory of a process outside torch's allocator, in MiB. The stacks of GPUs that are not told
are taken as those of the median card in `planner/devices/` from Turing on. Three figures are not fitted,
and lie far above the model: the seed notebook's, of torch 2.0.1 with CUDA 11.8, older than what is
planned for, and two that were read while a monitor (DCGM) was attached.
"""

from dataclasses import dataclass
from math import sqrt
from statistics import mean, median, stdev

from planner.context import (
    LAZY_MIB,
    LAZY_STACKS_MIB,
    Libraries,
    Loading,
    context_size,
    stacks_mib,
    typical_context,
)
from planner.device import Line, load_devices

# What cuDNN and cuBLAS load in the first steps: by so much the process peaks of Stone-ResearchLife/xMem
# (torch 2.6.0+cu124) exceed peak reserved memory; taken as evenly spread.
STEPS_MIB = (20, 120)


@dataclass(frozen=True, slots=True)
class Sample:
    """A published context."""

    source: str
    mib: float
    chip: tuple[tuple[int, int], int] | None  # capability and multiprocessors, where the GPU is told
    loading: Loading
    uses_cudnn: bool = False
    is_fitted: bool = True  # False: see above


SAMPLES = (
    Sample(
        "pytorch/pytorch#86509, torch 1.13: 287,047,680 B, less its tensor's 20 MiB", 254, None, Loading.LAZY
    ),
    Sample("pytorch/pytorch#107667, August 2023: about 300", 300, None, Loading.LAZY),
    Sample("pytorch/pytorch#109888, September 2023: around 400", 400, None, Loading.LAZY),
    Sample("RTX 6000 Ada, torch 2.10+cu130", 426, ((8, 9), 142), Loading.LAZY),
    Sample("pytorch/pytorch#86509, torch 1.13, eager: 636 less 20", 616, None, Loading.EAGER),
    Sample(
        "V100, torch 1.10, an empty context (transformers' documentation)", 1343, ((7, 0), 80), Loading.EAGER
    ),
    Sample("RTX 3090, torch 1.12, transformers (soodoshll/perfpred)", 1024, ((8, 6), 82), Loading.EAGER),
    Sample("TITAN RTX, torch 1.4, BERT's inference less its tensors", 840, ((7, 5), 72), Loading.EAGER),
    Sample("RTX 3090, torch 1.12, CNNs (soodoshll/perfpred)", 1690, ((8, 6), 82), Loading.EAGER, True),
    Sample("seed notebook, torch 2.0.1, CUDA 11.8: 24 GB card", 800, None, Loading.LAZY, False, False),
    Sample("A100, one neuron, with DCGM (GPUMemNet)", 1237, ((8, 0), 108), Loading.LAZY, False, False),
    Sample("A100, small ViT, with DCGM (GPUMemNet)", 1690, ((8, 0), 108), Loading.LAZY, True, False),
)


def usual_stacks() -> float:
    """Those of the median card."""
    known = [
        stacks_mib(card.capability, round(card.about.multiprocessors.value))
        for card in load_devices()
        if card.about is not None
        and card.about.multiprocessors is not None
        and card.about.line is not Line.SLICE
        and card.capability >= (7, 5)
    ]
    return median(known)


def stacks_of(sample: Sample) -> float:
    """Those of the sample's GPU, or the usual ones."""
    return usual_stacks() if sample.chip is None else stacks_mib(*sample.chip)


def fitted(loading: Loading) -> list[Sample]:
    """Published figures of contexts alone, without cuDNN."""
    return [one for one in SAMPLES if one.loading is loading and one.is_fitted and not one.uses_cudnn]


def fit_lazy() -> tuple[float, float, float]:
    """Mean and deviation of lazy contexts, and the mean of their stacks, in MiB."""
    samples = [one.mib for one in fitted(Loading.LAZY)]
    return mean(samples), stdev(samples), mean(map(stacks_of, fitted(Loading.LAZY)))


def fit_steps() -> tuple[float, float]:
    """Mean and deviation of what the first steps load."""
    low, high = STEPS_MIB
    return (low + high) / 2, (high - low) / sqrt(12)


def fit_eager() -> tuple[float, float, float]:
    """What loading at once adds: mean and deviation without cuDNN, and what cuDNN adds."""
    base = LAZY_MIB - LAZY_STACKS_MIB
    added = [one.mib - base - stacks_of(one) for one in fitted(Loading.EAGER)]
    by_cudnn = [one.mib for one in SAMPLES if one.uses_cudnn and one.is_fitted]
    same_card = [one.mib for one in fitted(Loading.EAGER) if one.chip == ((8, 6), 82)]
    return mean(added), stdev(added), by_cudnn[0] - same_card[0]


if __name__ == "__main__":
    print("lazy: {:.0f} MiB, deviation {:.0f}, of it stacks {:.0f}".format(*fit_lazy()))
    print("first steps: {:.0f} MiB, deviation {:.0f}".format(*fit_steps()))
    print("eager: {:.0f} MiB more, deviation {:.0f}; cuDNN {:.0f} on top".format(*fit_eager()))
    for sample in SAMPLES:
        loaded = Libraries.TRAINING if sample.uses_cudnn else Libraries.NONE
        if sample.chip is None:
            size = typical_context(sample.loading, loaded)
        else:
            size = context_size(*sample.chip, sample.loading, loaded)
        used = "" if sample.is_fitted else " (not fitted)"
        print(f"{sample.mib:6.0f}  model {size.mib:5} +- {size.spread_mib:3}  {sample.source}{used}")
