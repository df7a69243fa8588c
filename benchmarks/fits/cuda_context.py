"""Print the constants of `planner/hardware/context.py` from their sources, and published contexts beside
it.

    python -m benchmarks.fits.cuda_context

benchmarks/published/contexts.csv holds figures of torch's out-of-memory messages in processes of torch 2.1
and later: memory in use by the process, allocated, reserved but unallocated; the rest is the context (each
figure in GiB is rounded to 10 MiB). Rows are fitted, GPU by GPU, unless the column gives a reason. The GPU is
the one that the text names, or the only one with that total memory. Contexts of kernels that are loaded at
once are those of older versions of torch, below. Two that were read while a monitor (DCGM) was attached, and
one that torch 2.0.1 left in a notebook, are printed but not fitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import hypot, sqrt
from pathlib import Path
from statistics import linear_regression, mean, median, stdev

from benchmarks.rows import read_lines
from planner.hardware.context import (
    BASE_MIB,
    SPREAD_MIB,
    STACKS_SHARE,
    TYPICAL_STACKS_MIB,
    TYPICAL_STACKS_SPREAD_MIB,
    ContextSize,
    context_size,
    stacks_mib,
)
from planner.hardware.database import load_devices
from planner.hardware.device import ProductLine

MESSAGES = Path(__file__).parents[1] / "published" / "contexts.csv"
# What cuDNN and cuBLAS load in the first steps: by so much the process peaks of Stone-ResearchLife/xMem
# (torch 2.6.0+cu124) exceed peak reserved memory; taken as evenly spread.
STEPS_RANGE_MIB = (20, 120)
FITTED = "yes"


# Of a context of the planner's model: what cuBLAS and cuDNN load in the first steps.
STEPS_MIB, STEPS_SPREAD_MIB = 70, 29
# Loaded at once, as torch did before 1.13: its own kernels and cuBLAS's; cuDNN's where it is used.
EAGER_MIB, EAGER_SPREAD_MIB = 730, 244
EAGER_CUDNN_MIB = 666


class Loading(StrEnum):
    """The time at which kernels are loaded: CUDA_MODULE_LOADING."""

    LAZY = "lazy"  # the default since CUDA 11.7 and torch 1.13
    EAGER = "eager"


def loading_of(torch: str) -> Loading:
    """Return when a version of torch loads kernels by default.

    >>> loading_of("1.12.1+cu113"), loading_of("2.11.0+cu128")
    (<Loading.EAGER: 'eager'>, <Loading.LAZY: 'lazy'>)
    """
    major, minor = (int(part) for part in torch.partition("+")[0].split(".")[:2])
    return Loading.LAZY if (major, minor) >= (1, 13) else Loading.EAGER


class Libraries(StrEnum):
    """The libraries that are loaded besides torch's own kernels."""

    NONE = "none"  # one small tensor was made
    TRAINING = "training"  # cuBLAS and cuDNN have run some steps


@dataclass(frozen=True, slots=True)
class Message:
    """The figures of a process in an out-of-memory message."""

    gpu: str
    capability: tuple[int, int]
    sm_count: int
    context_mib: float
    fitted: str  # "yes", or why not
    source: str

    @property
    def stacks(self) -> float:
        return stacks_mib(self.capability, self.sm_count)


@dataclass(frozen=True, slots=True)
class Sample:
    """A published context that no such message contains."""

    source: str
    mib: float
    chip: tuple[tuple[int, int], int] | None  # capability and multiprocessors, if the GPU is known
    loading: Loading
    uses_cudnn: bool = False
    is_fitted: bool = True  # False: see above


SAMPLES = (
    Sample("pytorch/pytorch#86509, torch 1.13, eager: 636 less 20", 616, None, Loading.EAGER),
    Sample(
        "V100, torch 1.10, an empty context (transformers' documentation)", 1343, ((7, 0), 80), Loading.EAGER
    ),
    Sample("RTX 3090, torch 1.12, transformers (soodoshll/perfpred)", 1024, ((8, 6), 82), Loading.EAGER),
    Sample("TITAN RTX, torch 1.4, BERT's inference less its tensors", 840, ((7, 5), 72), Loading.EAGER),
    Sample("RTX 3090, torch 1.12, CNNs (soodoshll/perfpred)", 1690, ((8, 6), 82), Loading.EAGER, True),
    Sample(
        "T4, torch 2.11.0+cu128, total less free less reserved (highwaterlabs/torch-preflight)",
        135,
        ((7, 5), 40),
        Loading.LAZY,
        True,
        False,
    ),  # fmt: skip
    Sample(
        "pytorch/pytorch#86509, torch 1.13: 287,047,680 B, less its tensor's 20 MiB",
        254,
        None,
        Loading.LAZY,
        False,
        False,
    ),
    Sample("pytorch/pytorch#107667, August 2023: about 300", 300, None, Loading.LAZY, False, False),
    Sample("pytorch/pytorch#109888, September 2023: around 400", 400, None, Loading.LAZY, False, False),
    Sample("seed notebook, torch 2.0.1, CUDA 11.8: 24 GB card", 800, None, Loading.LAZY, False, False),
    Sample("A100, one neuron, with DCGM (GPUMemNet)", 1237, ((8, 0), 108), Loading.LAZY, False, False),
    Sample("A100, small ViT, with DCGM (GPUMemNet)", 1690, ((8, 0), 108), Loading.LAZY, True, False),
)


def read_messages(path: Path = MESSAGES) -> list[Message]:
    """Return the messages, each with the context that follows from it."""
    return [_message(line) for line in read_lines(path)]


def _message(line: dict[str, str]) -> Message:
    major, minor = line["compute_capability"].split(".")
    left = (float(line["in_use_gib"]) - float(line["allocated_gib"])) * 1024 - float(line["reserved_mib"])
    return Message(
        line["gpu"], (int(major), int(minor)), int(line["sm_count"]), left, line["fitted"], line["source"]
    )


def card_stacks() -> list[float]:
    """Return the stacks of the known cards from Turing on."""
    return [
        stacks_mib(card.capability, round(card.about.multiprocessors.value))
        for card in load_devices()
        if card.about is not None
        and card.about.multiprocessors is not None
        and card.about.line is not ProductLine.SLICE
        and card.capability >= (7, 5)
    ]


def fit_stacks() -> tuple[float, float]:
    """Return the median of the cards' stacks, and their deviation."""
    return median(card_stacks()), stdev(card_stacks())


def fit_lazy(messages: Sequence[Message]) -> tuple[float, float, float]:
    """Return base, share of the stacks and deviation, from the means of the GPUs."""
    fitted = [message for message in messages if message.fitted == FITTED]
    chips = sorted({(message.gpu, message.stacks) for message in fitted})
    means = [mean(message.context_mib for message in fitted if message.gpu == gpu) for gpu, _ in chips]
    line = linear_regression([stacks for _, stacks in chips], means)
    squares = sum(
        (message.context_mib - line.intercept - line.slope * message.stacks) ** 2 for message in fitted
    )
    return line.intercept, line.slope, sqrt(squares / (len(fitted) - 2))


def fit_steps() -> tuple[float, float]:
    """Return mean and deviation of the memory that the first steps load."""
    low, high = STEPS_RANGE_MIB
    return (low + high) / 2, (high - low) / sqrt(12)


def fit_eager() -> tuple[float, float, float]:
    """Return the memory that loading at once adds: mean and deviation without cuDNN, and cuDNN's part."""
    eager = [sample for sample in SAMPLES if sample.loading is Loading.EAGER]
    alone = [sample for sample in eager if not sample.uses_cudnn]
    added = [sample.mib - BASE_MIB + STEPS_MIB - STACKS_SHARE * _stacks_of(sample) for sample in alone]
    by_cudnn = [sample.mib for sample in eager if sample.uses_cudnn]
    same_card = [sample.mib for sample in alone if sample.chip == ((8, 6), 82)]
    return mean(added), stdev(added), by_cudnn[0] - same_card[0]


def _stacks_of(sample: Sample) -> float:
    return fit_stacks()[0] if sample.chip is None else stacks_mib(*sample.chip)


def published_size(
    chip: tuple[tuple[int, int], int] | None, loading: Loading, libraries: Libraries
) -> ContextSize:
    """Return the context of a GPU, or of the median one, as older and smaller processes have it."""
    stacks = TYPICAL_STACKS_MIB if chip is None else stacks_mib(*chip)
    mib, spreads = BASE_MIB + STACKS_SHARE * stacks, [float(SPREAD_MIB)]
    if chip is None:
        spreads.append(STACKS_SHARE * TYPICAL_STACKS_SPREAD_MIB)
    if libraries is Libraries.NONE or loading is Loading.EAGER:
        mib, spreads = mib - STEPS_MIB, [*spreads, STEPS_SPREAD_MIB]
    if loading is Loading.EAGER:
        mib, spreads = mib + EAGER_MIB, [*spreads, EAGER_SPREAD_MIB]
        if libraries is Libraries.TRAINING:
            mib += EAGER_CUDNN_MIB
    return ContextSize(round(mib), round(hypot(*spreads)))


def print_all() -> None:
    """Print the constants, and every published figure beside the model."""
    messages = read_messages()
    print("lazy: {:.0f} MiB + {:.3f} x stacks, deviation {:.0f}".format(*fit_lazy(messages)))
    print("stacks of a typical GPU: {:.0f} MiB, deviation {:.0f}".format(*fit_stacks()))
    print("first steps: {:.0f} MiB, deviation {:.0f}".format(*fit_steps()))
    print("eager: {:.0f} MiB more, deviation {:.0f}; cuDNN {:.0f} on top".format(*fit_eager()))
    for message in messages:
        size = context_size(message.capability, message.sm_count)
        note = "" if message.fitted == FITTED else f" (not fitted: {message.fitted})"
        model = f"model {size.mib:5} +- {size.spread_mib:3}"
        print(f"{message.context_mib:6.0f}  {model}  {message.gpu}: {message.source}{note}")
    for sample in SAMPLES:
        loaded = Libraries.TRAINING if sample.uses_cudnn else Libraries.NONE
        size = published_size(sample.chip, sample.loading, loaded)
        used = "" if sample.is_fitted else " (not fitted)"
        print(f"{sample.mib:6.0f}  model {size.mib:5} +- {size.spread_mib:3}  {sample.source}{used}")


if __name__ == "__main__":
    print_all()
