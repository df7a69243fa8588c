"""The calibration that answers, and the budget that follows from it."""

from statistics import NormalDist

import pytest
from hypothesis import given, strategies as st

from planner.allocator.config import AllocatorConfig
from planner.hardware.budget import make_budget, process_bytes, upper_process_bytes
from planner.hardware.calibration.lookup import (
    CONTEXT_SPREAD_BYTES,
    CalibrationQuery,
    Correction,
    MatchLevel,
    find_calibration,
    is_same_gpu,
)
from planner.hardware.calibration.model import Calibration
from planner.hardware.device import MIB, Device, FigureKind, SourcedBytes, generic_device
from planner.jobs import Optimizer, ZeroGrad
from tests.helpers.calibrations import CARD, FIT, JOB, KEY, REFUSAL, VERSIONS, calibration
from tests.helpers.structs import replace

RULES = AllocatorConfig()
ADAM = JOB.replace(optimizer=Optimizer.ADAM)
OTHER = replace(
    CARD, name="RTX 4090", aliases=(), total=SourcedBytes(24_564 * MIB, "made up"), capability=(8, 9)
)
NEWER = replace(CARD, name="RTX 5090", aliases=(), capability=(12, 0))
PUBLISHED = replace(calibration(), source="published", includes_context=False)


def best(stored: list[Calibration], query: CalibrationQuery) -> Correction:
    correction = find_calibration(stored, query)
    assert correction is not None
    return correction


def test_exact() -> None:
    """The same job on the same GPU under the same version answers exactly, with its whole line."""
    correction = best([calibration()], CalibrationQuery(JOB, CARD, "2.6.1"))
    assert correction == Correction(
        level=MatchLevel.EXACT,
        about="torchvision:resnet18 with sgd on NVIDIA GeForce RTX 3060, torch 2.6.0+cu124, measured",
        source="measured",
        context=SourcedBytes(
            350 * MIB,
            "measured: torchvision:resnet18 with sgd on NVIDIA GeForce RTX 3060, torch 2.6.0+cu124, measured",
            0,
            FigureKind.MEASURED,
        ),
        fit=FIT,
        includes_context=True,
        extra_spread_bytes=0,
    )


def test_unknown_versions_count_as_the_same() -> None:
    """A query without a version gets any version, as exact."""
    assert best([calibration()], CalibrationQuery(JOB, CARD)).level is MatchLevel.EXACT


@pytest.mark.parametrize(
    ("query", "level", "has_fit", "extra_spread_bytes"),
    [
        (CalibrationQuery(JOB, CARD, "2.13.0"), MatchLevel.SAME_GPU, True, CONTEXT_SPREAD_BYTES),
        (CalibrationQuery(ADAM, CARD, "2.6.0"), MatchLevel.SAME_GPU, False, 0),
        (CalibrationQuery(JOB, OTHER, "2.6.0"), MatchLevel.SAME_ARCHITECTURE, True, CONTEXT_SPREAD_BYTES),
        (CalibrationQuery(ADAM, OTHER, "2.6.0"), MatchLevel.SAME_ARCHITECTURE, False, CONTEXT_SPREAD_BYTES),
    ],
)
def test_levels(query: CalibrationQuery, level: MatchLevel, has_fit: bool, extra_spread_bytes: int) -> None:
    """Other versions, another job, another GPU of the architecture: each answers at its level, the line for
    the same job only and else the context, and the interval widens.
    """
    correction = best([calibration()], query)
    assert (correction.level, correction.fit is not None) == (level, has_fit)
    assert correction.extra_spread_bytes == extra_spread_bytes
    assert correction.context is not None
    assert correction.context.value == 350 * MIB


@pytest.mark.parametrize(
    "query",
    [
        CalibrationQuery(JOB, NEWER),
        CalibrationQuery(JOB, generic_device(12_288)),
        CalibrationQuery(JOB, CARD, alloc_conf="expandable_segments:True"),
    ],
)
def test_defaults(query: CalibrationQuery) -> None:
    """Another architecture, a GPU of which only the memory is known, and other options of the allocator: the
    defaults.
    """
    assert find_calibration([calibration()], query) is None


def test_nearest_wins() -> None:
    """The nearest level answers in any order of the files, the first of equal ones."""
    near = calibration(replace(KEY, versions=replace(VERSIONS, torch="2.13.0")))
    far = calibration(replace(KEY, gpu="RTX 4090", versions=replace(VERSIONS, nvml_total_bytes=None)))
    query = CalibrationQuery(JOB, CARD, "2.13.0")
    for stored in ([near, calibration(), far], [far, calibration(), near]):
        assert best(stored, query).about.count("2.13.0") == 1
    twin = replace(calibration(), fit=replace(FIT, slope=1.5))
    assert best([twin, calibration()], CalibrationQuery(JOB, CARD)).fit == twin.fit


def test_refused_fit_still_gives_the_context() -> None:
    """Runs that support no line still give the context of their GPU."""
    correction = best([calibration(fit=REFUSAL)], CalibrationQuery(JOB, CARD))
    assert (correction.fit, correction.level) == (None, MatchLevel.SAME_GPU)
    assert correction.context is not None


def test_published_runs_do_not_answer_for_other_jobs() -> None:
    """Published rises hold no context, so they apply to no other job."""
    runs = tuple(
        replace(point, observation=replace(point.observation, context_after_bytes=None))
        for point in PUBLISHED.points
    )
    assert find_calibration([replace(PUBLISHED, points=runs)], CalibrationQuery(ADAM, CARD)) is None


def test_what_makes_jobs_the_same() -> None:
    """The catalogue's name and the number of steps do not count; where zero_grad stands does."""
    renamed = JOB.replace(model="torchvision:resnet18", source="", steps=9)
    assert best([calibration()], CalibrationQuery(renamed, CARD)).fit == FIT
    moved = JOB.replace(zero_grad=ZeroGrad.AFTER_STEP)
    assert best([calibration()], CalibrationQuery(moved, CARD)).fit is None


def test_a_line_is_one_through_replays_with_the_same_workspaces() -> None:
    """Only the context carries over, from runs planned by published workspaces to plans in which a cuDNN
    answers. Whichever cuDNN does, the line stays; a job without convolutions names none.
    """
    published, asked = (
        calibration(replace(KEY, job=JOB.replace(cudnn=name))) for name in ("published", "stored")
    )
    plan = CalibrationQuery(JOB.replace(cudnn="installed"), CARD)
    assert best([published], plan).fit is None
    assert best([published], plan).context is not None
    assert best([asked], plan).fit == FIT
    assert best([calibration()], plan).fit == FIT


def test_names_of_cards() -> None:
    """A GPU answers to torch's name for it, unless the memory shows that it is another of that name."""
    assert is_same_gpu(CARD, "NVIDIA GeForce RTX 3060", VERSIONS)
    assert not is_same_gpu(CARD, "NVIDIA GeForce RTX 3060 Ti", VERSIONS)
    assert not is_same_gpu(CARD, "RTX 3060", replace(VERSIONS, nvml_total_bytes=8_192 * MIB))


def test_benchmarked_runs_do_not_answer_for_others() -> None:
    """Runs with cuDNN's benchmark mode answer for jobs with it, and for no other, not even their context."""
    with_it = JOB.replace(cudnn_benchmark=True)
    assert find_calibration([calibration(replace(KEY, job=with_it))], CalibrationQuery(JOB, CARD)) is None
    assert find_calibration([calibration()], CalibrationQuery(with_it, CARD)) is None
    assert best([calibration(replace(KEY, job=with_it))], CalibrationQuery(with_it, CARD)).fit == FIT


def corrected(card: Device = CARD, stored: Calibration | None = None) -> Correction:
    return best([stored or calibration()], CalibrationQuery(JOB, card, "2.6.0"))


def test_budget_by_hand() -> None:
    """The budget is usable less overhead less one deviation, by the slope, with the measured context."""
    budget = make_budget(CARD, NormalDist().cdf(1), RULES, None, corrected())
    assert budget.limits.capacity_bytes == int((11_900 - 500 - 10) * MIB / 1.02)
    assert budget.device.context.value == 350 * MIB
    assert process_bytes(budget, 1_000 * MIB) == round((500 + 1_020) * MIB)


def test_budget_without_context_by_hand() -> None:
    """If the overhead holds no context, the GPU's is added, and its spread: sqrt(30 ** 2 + 40 ** 2)."""
    stored = replace(PUBLISHED, fit=replace(FIT, spread_bytes=30 * MIB))
    budget = make_budget(CARD, NormalDist().cdf(1), RULES, None, corrected(stored=stored))
    assert budget.limits.capacity_bytes == pytest.approx((11_900 - 900 - 50) * MIB / 1.02, abs=2)
    assert budget.device.context.value == 400 * MIB
    assert process_bytes(budget, 1_000 * MIB) == round((900 + 1_020) * MIB)


def test_context_alone() -> None:
    """Another job's context replaces the GPU's, and all else stays uncalibrated."""
    correction = best([calibration()], CalibrationQuery(ADAM, CARD))
    budget = make_budget(CARD, 0.9, RULES, None, correction)
    assert correction.context is not None
    plain = make_budget(replace(CARD, context=correction.context), 0.9, RULES)
    assert budget == replace(plain, correction=correction)
    assert upper_process_bytes(budget, 5_000 * MIB) == upper_process_bytes(plain, 5_000 * MIB)


def test_cap_is_left_alone() -> None:
    """A cap on the allocator bounds it alone: the calibration moves the GPU's capacity, not the cap."""
    plain = make_budget(CARD, 0.99, RULES, 2_000 * MIB).limits
    calibrated = make_budget(CARD, 0.99, RULES, 2_000 * MIB, corrected()).limits
    assert calibrated.limit_bytes == plain.limit_bytes
    assert calibrated.capacity_bytes != plain.capacity_bytes


@given(st.floats(0.5, 0.999), st.floats(0.5, 0.999), st.integers(0, 11_000))
def test_upper_bounds(one: float, other: float, reserved_mib: int) -> None:
    """The calibrated bound is at least the expected process, rises with the confidence, and passes the GPU
    only where the process does.
    """
    low, high = (
        upper_process_bytes(make_budget(CARD, p, RULES, None, corrected()), reserved_mib * MIB)
        for p in sorted((one, other))
    )
    expected = process_bytes(make_budget(CARD, 0.9, RULES, None, corrected()), reserved_mib * MIB)
    assert min(expected, CARD.usable.value) <= low <= high
    assert high <= CARD.usable.value or expected > CARD.usable.value
