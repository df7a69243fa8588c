"""Estimates that are one sum: the formula and its inverse on a GPU, and their reports; no torch."""

import pytest

from planner.allocator.config import AllocatorConfig, MemoryLimits
from planner.errors import UsageError
from planner.hardware.budget import Budget
from planner.hardware.device import MIB, Device, FigureKind, SourcedBytes, unlimited_device
from planner.jobs import Job, Loss, Mode, Optimizer, TensorSpec
from planner.planning.estimators.formula import AffineCounts, Counts
from planner.planning.estimators.methods import Method
from planner.planning.estimators.peers import MEGABYTE_BYTES, PeerEstimate, sum_of_layers
from planner.planning.estimators.static_estimate import (
    StaticEstimate,
    formula_estimate,
    formula_plan,
    moments_of,
    peer_estimate,
)
from planner.report.commands.estimates.static_estimate import (
    formula_plan_document,
    formula_plan_to_json,
    static_estimate_document,
    static_estimate_to_json,
)
from planner.report.plain import WIDTH, render_plain
from tests.helpers.golden import FOLDER, expected
from tests.helpers.structs import replace

GOLDEN = FOLDER / "static_estimate"
JOB = Job.create(
    "toy", source="zoo:Toy", inputs=(TensorSpec((3, 4)),), loss=Loss.SUM, optimizer=Optimizer.ADAM, steps=2
)
CARD = Device(
    name="Card 1",
    total=SourcedBytes(1024 * MIB, "nvidia-smi", kind=FigureKind.PUBLISHED),
    usable=SourcedBytes(800 * MIB, "torch's log", 10 * MIB, FigureKind.PUBLISHED),
    context=SourcedBytes(300 * MIB, "one measurement", 20 * MIB, FigureKind.MEASURED),
    capability=(8, 6),
)
# 1 MiB of data and 4 MiB of outputs a sample, 8 MiB of weights: training with Adam takes 32 + 10 B.
COUNTS = AffineCounts(MIB // 4, MIB, 0, 2 * MIB)


def card(left_mib: int) -> Budget:
    return Budget(CARD, 0.99, None, MemoryLimits(left_mib * MIB, None, None, AllocatorConfig()))


def no_card() -> Budget:
    return Budget(unlimited_device(), 0.99, None, MemoryLimits(None, None, None, AllocatorConfig()))


def formula(batch: int, budget: Budget, job: Job = JOB) -> StaticEstimate:
    return formula_estimate(job, batch, budget, COUNTS.at(batch), 0.5)


def peer(budget: Budget, job: Job = JOB) -> StaticEstimate:
    estimate = sum_of_layers(3 * MIB, 5 * MIB, 2 * MIB, MEGABYTE_BYTES)
    return peer_estimate(Method.TORCHINFO, job, 3, budget, estimate, 0.5)


def test_the_formula_prints_its_seven_lines() -> None:
    """Data, weight, forward output, weight gradient with moments, output gradient, and two totals."""
    assert formula_estimate(JOB, 1, no_card(), Counts(1, 10, 100), 0.0).lines == (
        ("Data", 4),
        ("Weight", 400),
        ("Forward output", 40),
        ("Weight gradient", 1200),
        ("Output gradient", 44),
        ("Total for training", 1688),
        ("Total for inference", 444),
    )


def test_the_total_is_that_of_the_mode() -> None:
    """Training counts the gradients, inference does not."""
    assert formula(3, no_card()).total_bytes == 62 * MIB
    assert formula(3, no_card(), JOB.replace(mode=Mode.INFER)).total_bytes == 23 * MIB


def test_the_formula_refuses_a_forward_pass_in_training_mode() -> None:
    """The formula has no line for gradients that are recorded and never computed."""
    with pytest.raises(UsageError) as caught:
        moments_of(JOB.replace(mode=Mode.FORWARD))
    assert str(caught.value) == (
        "--mode forward: the formula knows training and inference; give --mode train or --mode infer, or use "
        "--method trace"
    )


def test_the_card_leaves_the_smaller_of_its_memory_and_the_cap() -> None:
    """The smaller of memory and cap bounds an estimate, and without either nothing does."""
    assert MemoryLimits(100, 90, None, AllocatorConfig()).allocator_limit_bytes == 90
    assert card(100).limits.allocator_limit_bytes == 100 * MIB
    assert no_card().limits.allocator_limit_bytes is None


def test_an_estimate_fits_up_to_what_is_left() -> None:
    """A total of exactly what is left fits, one byte less does not hold it."""
    tight = replace(card(62), limits=MemoryLimits(62 * MIB - 1, None, None, AllocatorConfig()))
    assert [formula(3, budget).fits for budget in (no_card(), card(62), tight)] == [True, True, False]


@pytest.mark.parametrize(("left_mib", "largest"), [(41, 0), (42, 1), (51, 1), (52, 2), (1032, 100)])
def test_the_inverse_is_the_largest_batch_whose_total_is_left(left_mib: int, largest: int) -> None:
    """32 MiB and 10 a sample: the division's answer fits and the next one does not."""
    plan = formula_plan(JOB, card(left_mib), COUNTS, 0.5)
    assert plan.max_batch == largest
    assert plan.first_failure.batch == largest + 1
    assert not plan.first_failure.fits
    assert (plan.at_max.batch if plan.at_max else 0) == largest
    assert plan.at_max is None or plan.at_max.fits


def test_inference_has_its_own_inverse() -> None:
    """8 MiB and 5 a sample: 100 MiB hold 18."""
    assert formula_plan(JOB.replace(mode=Mode.INFER), card(100), COUNTS, 0.5).max_batch == 18


def test_nothing_is_inverted_without_a_bound() -> None:
    """A GPU without end has no largest batch."""
    with pytest.raises(ValueError, match="without a GPU or a cap no batch is the largest"):
        formula_plan(JOB, no_card(), COUNTS, 0.5)


def test_a_tracked_peak_is_the_sum_of_its_categories() -> None:
    """MemTracker's categories add up to its total."""
    estimate = peer_estimate(
        Method.MEMTRACKER, JOB, 1, no_card(), PeerEstimate((("Parameter", 3), ("Temp", 4))), 0.0
    )
    assert (estimate.lines, estimate.total_bytes) == ((("Parameter", 3), ("Temp", 4), ("Total", 7)), 7)


def reports() -> dict[str, str]:
    documents = {
        "formula": static_estimate_document(formula(3, no_card()), 1.5),
        "formula_no": static_estimate_document(formula(30, card(100)), 1.5),
        "max_batch": formula_plan_document(formula_plan(JOB, card(100), COUNTS, 0.5), 1.5),
        "max_batch_none": formula_plan_document(formula_plan(JOB, card(30), COUNTS, 0.5), 1.5),
        "torchinfo_infer": static_estimate_document(peer(card(100), JOB.replace(mode=Mode.INFER)), 1.5),
    }
    return {name: render_plain(document) for name, document in documents.items()}


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt")))
def test_text(name: str) -> None:
    """Each report reads, to the letter, as its golden file."""
    text = reports()[name] + "\n"
    assert text == expected(f"static_estimate/{name}.txt", text)


def test_every_report_has_a_golden_file_and_fits_a_terminal() -> None:
    """No report is without a golden file, and no line is longer than 100 columns or ends in a blank."""
    assert sorted(reports()) == sorted(path.stem for path in GOLDEN.glob("*.txt"))
    lines = [line for report in reports().values() for line in report.splitlines()]
    assert [line for line in lines if len(line) > WIDTH or line != line.rstrip()] == []


def test_json_of_an_estimate_has_null_for_what_is_not_known() -> None:
    """The total stands for the allocated peak, the seven lines beside it; the rest is null."""
    fields = static_estimate_to_json(formula(3, card(100)), 1.5)
    known = ("method", "peak_allocated_mib", "fits", "terms_mib", "seconds")
    assert {key: fields[key] for key in known} == {
        "method": "formula",
        "peak_allocated_mib": 62.0,
        "fits": "yes",
        "terms_mib": {
            "data": 3.0,
            "weight": 8.0,
            "forward_output": 12.0,
            "weight_gradient": 24.0,
            "output_gradient": 15.0,
            "total_for_training": 62.0,
            "total_for_inference": 23.0,
        },
        "seconds": {"import": 1.5, "trace": 0.5, "replay": 0.0},
    }
    assert {key for key, value in fields.items() if value is None} == {
        *("peak_reserved_mib", "end_allocated_mib", "process_mib", "process_upper_mib", "retries", "failure"),
        *("breakdown_mib", "calibration", "unknown_ops", "p_out_of_memory"),
    }


def test_json_of_a_plan_has_no_probes() -> None:
    """Nothing is searched, and the formula does not know how comfortable a batch is."""
    fields = formula_plan_to_json(formula_plan(JOB, card(100), COUNTS, 0.5), 1.5)
    keys = ("method", "max_batch", "comfortable_batch", "probes")
    assert [fields[key] for key in keys] == ["formula", 6, None, []]
    assert (fields["at_max"]["batch"], fields["first_failure"]["batch"]) == (6, 7)
    assert formula_plan_to_json(formula_plan(JOB, card(30), COUNTS, 0.5), 1.5)["at_max"] is None
