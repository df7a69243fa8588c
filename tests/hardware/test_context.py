"""The size of a CUDA context that was never measured."""

from statistics import mean

import pytest

from benchmarks.fits import cuda_context as script
from benchmarks.fits.cuda_context import Libraries, Loading, loading_of, published_size
from planner.hardware import context
from planner.hardware.context import ContextSize, context_size, stacks_mib, typical_context
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.program.target import threads_per_sm


def test_constants_are_what_the_script_prints() -> None:
    """Every constant is fitted to the published figures of benchmarks/fits/cuda_context.py."""
    base, share, spread = script.fit_lazy(script.read_messages())
    assert (round(base), round(share, 3), round(spread)) == (
        context.BASE_MIB,
        context.STACKS_SHARE,
        context.SPREAD_MIB,
    )
    typical = (context.TYPICAL_STACKS_MIB, context.TYPICAL_STACKS_SPREAD_MIB)
    assert tuple(map(round, script.fit_stacks())) == typical
    assert tuple(map(round, script.fit_steps())) == (script.STEPS_MIB, script.STEPS_SPREAD_MIB)
    eager = (script.EAGER_MIB, script.EAGER_SPREAD_MIB, script.EAGER_CUDNN_MIB)
    assert tuple(map(round, script.fit_eager())) == eager


def test_typical_contexts() -> None:
    """The contexts of an unknown GPU are known for one tensor, for training, and for loading at once."""
    sizes = [published_size(None, loading, loaded).mib for loading in Loading for loaded in Libraries]
    assert sizes == [188, 258, 918, 1584]


def test_an_unknown_gpu_may_be_a_small_or_a_large_one() -> None:
    """The deviation holds that of the GPUs' multiprocessors, 2.028 x 74 MiB, beside that of one GPU."""
    assert typical_context() == ContextSize(258, 155)


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "mib"),
    [((7, 5), 40, 40), ((8, 0), 108, 216), ((8, 9), 128, 192), ((9, 0), 132, 264), ((12, 0), 170, 255)],
)
def test_stacks(capability: tuple[int, int], multiprocessors: int, mib: float) -> None:
    """T4, A100, RTX 4090, H100, RTX 5090: a KiB for each thread that the GPU holds."""
    assert stacks_mib(capability, multiprocessors) == mib


def test_the_context_of_a_t4() -> None:
    """Measured twice: 135 to 141 MB by mem_get_info with torch 2.11, 109 to 154 MiB in ten messages."""
    card = find_device("T4").context
    assert 135_000_000 <= card.value <= 141_500_000
    assert abs(card.value - context_size((7, 5), 40).mib * MIB) < 40 * MIB


def test_published_contexts_lie_within_three_deviations() -> None:
    """Every published context that is fitted, and the mean of each kind of GPU within two."""
    by_gpu: dict[tuple[object, int], list[float]] = {}
    for message in script.read_messages():
        if message.fitted == "yes":
            size = context_size(message.capability, message.sm_count)
            assert abs(message.context_mib - size.mib) <= 3 * size.spread_mib, message.source
            by_gpu.setdefault((message.capability, message.sm_count), []).append(
                message.context_mib - size.mib
            )
    assert len(by_gpu) == 11
    assert all(abs(mean(off)) <= 2 * context.SPREAD_MIB for off in by_gpu.values())


def test_the_context_fits_beside_the_largest_process_of_an_rtx_4060() -> None:
    """A run reached 7,816 MiB above its empty context on a GPU of 7,933 (xMem): the context before the first
    steps took 117 MiB at most.
    """
    size = published_size(((8, 9), 24), Loading.LAZY, Libraries.NONE)
    assert size.mib <= 117


def test_published_contexts_of_kernels_loaded_at_once() -> None:
    """Contexts of torch 1.4 to 1.12 lie within two deviations."""
    for sample in script.SAMPLES:
        if sample.loading is Loading.EAGER and sample.chip is not None:
            loaded = Libraries.TRAINING if sample.uses_cudnn else Libraries.NONE
            size = published_size(sample.chip, sample.loading, loaded)
            assert abs(sample.mib - size.mib) <= 2 * size.spread_mib, sample.source


@pytest.mark.parametrize(
    ("capability", "threads"),
    [((6, 1), 2048), ((7, 5), 1024), ((8, 0), 2048), ((8, 7), 1536), ((9, 0), 2048), ((12, 1), 1536)],
)
def test_threads_of_a_multiprocessor(capability: tuple[int, int], threads: int) -> None:
    """One table of the CUDA Programming Guide gives contexts, cuDNN and reductions alike."""
    assert threads_per_sm(capability) == threads


@pytest.mark.parametrize(
    ("torch", "loading"),
    [
        ("1.10.0", Loading.EAGER),
        ("1.12.1+cu113", Loading.EAGER),
        ("1.13.0", Loading.LAZY),
        ("2.11.0", Loading.LAZY),
    ],
)
def test_loading_by_version(torch: str, loading: Loading) -> None:
    """Kernels are loaded as they are used since torch 1.13."""
    assert loading_of(torch) is loading
