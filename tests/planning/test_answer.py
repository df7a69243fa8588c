"""What is said of a batch: figures are those of the GPU as it is, words follow the probability."""

import pytest

from planner.allocator.config import MIB, AllocatorConfig
from planner.hardware.budget import Budget, make_budget
from planner.hardware.device import Device, SourcedBytes
from planner.hardware.likeness import Likeness
from planner.jobs import Job
from planner.planning.estimate import Answer, Estimate, estimate_batch
from planner.program.events import Alloc, Category, Free, Outcome, Phase, PhaseStart, Trace
from planner.report.commands.estimates.estimate import estimate_document, estimate_to_json
from planner.report.plain import render_plain
from tests.helpers.traces import SITES

JOB = Job.create("made up")


def card(usable_mib: int, likeness: Likeness = Likeness()) -> Budget:  # noqa: B008
    """A GPU whose memory is known to 20 MiB, beside a context of 400."""
    usable = SourcedBytes(usable_mib * MIB, "made up", 20 * MIB)
    device = Device("card", usable, usable, SourcedBytes(400 * MIB, "made up"), (8, 6))
    return make_budget(device, 0.99, AllocatorConfig(), likeness=likeness)


def one_block(size_mib: int, site: int = 0) -> Trace:
    """A step with one block."""
    block = Alloc(0, size_mib * MIB, Category.ACTIVATION, site)
    return Trace((PhaseStart(1, Phase.FORWARD), block, PhaseStart(1, Phase.END)), SITES, 8)


def estimated(trace: Trace, usable_mib: int, job: Job = JOB) -> Estimate:
    """Return the estimate of a trace on a GPU."""
    return estimate_batch(job, trace, card(usable_mib))


@pytest.mark.parametrize(
    ("needed_mib", "answer", "fits", "first_line"),
    [
        (500, Answer.FITS, "yes", "Batch 8 fits at confidence 0.99"),
        (580, Answer.LIKELY, "no", "Batch 8 likely fits (83 %)"),
        (
            620,
            Answer.DOES_NOT_FIT,
            "no",
            "Batch 8 does not fit; without a limit it would take 1,020.0 MiB, "
            "620.0 of them allocated at once",
        ),
    ],
)
def test_the_probability_decides_the_words(
    needed_mib: int, answer: Answer, fits: str, first_line: str
) -> None:
    """600 MiB are left, known to about 20; `fits` is at the confidence, which exit code 1 denies."""
    estimate = estimated(one_block(needed_mib), 1000)
    text = render_plain(estimate_document(estimate, 0.0))
    fields = estimate_to_json(estimate, 0.0)
    assert (estimate.answer, fields["answer"], fields["fits"]) == (answer, answer.value, fits)
    assert text.splitlines()[0] == first_line
    assert ("Exit code:      1: it does not fit at confidence 0.99" in text) == (answer is Answer.LIKELY)


def test_where_no_run_is_like_the_job_the_answer_is_not_known_between_its_margins() -> None:
    """Sharded over two GPUs: what the widest margins allow fits, what the GPU lacks does not."""
    job = Job.create("made up", fsdp=2)
    answers = [estimated(one_block(size), 1000, job).answer for size in (300, 580, 700)]
    assert answers == [Answer.FITS, Answer.NOT_KNOWN, Answer.DOES_NOT_FIT]
    text = render_plain(estimate_document(estimated(one_block(580), 1000, job), 0.0))
    assert text.startswith("It is not known whether batch 8 fits\n")
    assert "Risk:           not known: no run that is known is sharded over several GPUs" in text


def test_retries_and_peaks_are_those_of_the_gpu_as_it_is() -> None:
    """A cached block of 280 MiB must go where the margin leaves 520 of 600 MiB, and may stay on the GPU."""
    events = (
        PhaseStart(1, Phase.FORWARD),
        *(Alloc(0, 280 * MIB, Category.TEMPORARY, 0), Free(0)),
        Alloc(1, 290 * MIB, Category.ACTIVATION, 1),
        PhaseStart(1, Phase.END),
    )
    estimate = estimated(Trace(events, SITES, 8), 1000)
    assert (estimate.outcome, estimate.run.outcome) == (Outcome.FITS_WITH_RETRIES, Outcome.FITS)
    assert estimate.process_bytes == (400 + 280 + 290) * MIB
    fields = estimate_to_json(estimate, 0.0)
    assert (fields["retries"], fields["retry_costs"]) == (0, [])
    assert [cost["retries"] for cost in fields["retry_costs_at_confidence"]] == [1]
    text = " ".join(render_plain(estimate_document(estimate, 0.0)).split())
    assert "Retries: none expected; in the least memory at confidence 0.99, 1 in the step traced" in text
    assert "Batch 8, with retries" not in text


def test_memory_that_grows_fits_until_a_step() -> None:
    """100 MiB more with each step: the first line and the JSON say which step is the last that fits."""
    events = [
        event
        for step in (1, 2, 3)
        for event in (
            PhaseStart(step, Phase.FORWARD),
            Alloc(step, 100 * MIB, Category.ACTIVATION, 0),
        )
    ]
    estimate = estimated(Trace((*events, PhaseStart(3, Phase.END)), SITES, 8), 1000)
    first, second, *_ = render_plain(estimate_document(estimate, 0.0)).splitlines()
    assert first == "Batch 8 fits at confidence 0.99, until step 5: memory grows with every step"
    assert second == "Risk:           P(out of memory) below 0.1 % at batch 8 in 3 steps"
    assert estimate_to_json(estimate, 0.0)["fits_until_step"] == 5


def test_memory_that_grows_is_judged_at_the_end_of_an_epoch_whose_samples_are_known() -> None:
    """An epoch of 40 samples has five steps of 8, which fit; one of 80 has ten, of which five do."""
    events = [
        event
        for step in (1, 2, 3)
        for event in (PhaseStart(step, Phase.FORWARD), Alloc(step, 100 * MIB, Category.ACTIVATION, 0))
    ]
    trace = Trace((*events, PhaseStart(3, Phase.END)), SITES, 8)
    short, long = (estimated(trace, 1000, Job.create("made up", dataset_size=size)) for size in (40, 80))
    assert (short.outcome, short.answer) == (Outcome.FITS, Answer.FITS)
    assert (long.outcome, long.answer) == (Outcome.DOES_NOT_FIT, Answer.DOES_NOT_FIT)
    first, second, *_ = render_plain(estimate_document(long, 0.0)).splitlines()
    grows = "memory grows with every step, and lasts until step 5 of 10 in an epoch"
    assert first == f"Batch 8 does not fit: {grows}"
    assert second == "Risk:           P(out of memory) above 99.9 % at batch 8"
    assert estimate_to_json(long, 0.0)["fits"] == "no"
