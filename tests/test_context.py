"""The size of a CUDA context that nobody has measured."""

import runpy
from pathlib import Path

import pytest

from planner import context
from planner.context import ContextSize, Libraries, Loading, context_size, stacks_mib, typical_context

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "fit_context.py"


def test_constants_are_what_the_script_prints() -> None:
    """Every constant is fitted to the published figures that stand in benchmarks/fit_context.py."""
    script = runpy.run_path(str(SCRIPT))
    lazy = (context.LAZY_MIB, context.LAZY_SPREAD_MIB, context.LAZY_STACKS_MIB)
    assert tuple(map(round, script["fit_lazy"]())) == lazy
    assert tuple(map(round, script["fit_steps"]())) == (context.STEPS_MIB, context.STEPS_SPREAD_MIB)
    eager = (context.EAGER_MIB, context.EAGER_SPREAD_MIB, context.EAGER_CUDNN_MIB)
    assert tuple(map(round, script["fit_eager"]())) == eager


def test_typical_contexts() -> None:
    """Of an unknown GPU: what one tensor takes, what training adds, and what loading at once does."""
    sizes = [typical_context(loading, loaded) for loading in Loading for loaded in Libraries]
    assert sizes == [
        ContextSize(345, 81),
        ContextSize(415, 86),
        ContextSize(967, 287),
        ContextSize(1633, 287),
    ]


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "mib"),
    [((7, 5), 40, 40), ((8, 0), 108, 216), ((8, 9), 128, 192), ((9, 0), 132, 264), ((12, 0), 170, 255)],
)
def test_stacks(capability: tuple[int, int], multiprocessors: int, mib: float) -> None:
    """T4, A100, RTX 4090, H100, RTX 5090: a KiB for each thread that the GPU holds."""
    assert stacks_mib(capability, multiprocessors) == mib


def test_a_known_gpu_is_the_typical_one_with_its_own_stacks() -> None:
    """An A100 holds 93 MiB more of stacks than the typical GPU, and half of that is one more deviation."""
    assert context_size((8, 0), 108) == ContextSize(415 + 93, 98)


def test_published_contexts_lie_within_two_deviations() -> None:
    """All figures that the constants are fitted to, and the eager one of a CNN, which only cuDNN's is."""
    script = runpy.run_path(str(SCRIPT))
    for sample in script["SAMPLES"]:
        if sample.is_fitted:
            loaded = Libraries.TRAINING if sample.uses_cudnn else Libraries.NONE
            known = sample.chip or ((8, 6), 82)
            size = context_size(*known, sample.loading, loaded)
            assert abs(sample.mib - size.mib) <= 2 * size.spread_mib, sample.source
