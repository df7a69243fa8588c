"""Samples of many sizes: programs at any size, sampled runs through one allocator, and plans."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import planner.capture.session
from planner import advise, estimate, explain, gpus, max_batch
from planner.allocator import MemoryLimits, replay_trace
from planner.allocator.config import UNLIMITED
from planner.allocator.history import Recording
from planner.api.advise import VaryingAdviceResult
from planner.api.compare import compare
from planner.api.estimate import EstimateResult
from planner.api.explain import VaryingExplainResult
from planner.api.request.varying import VaryingResult
from planner.capture.loop.batches import batch_loader
from planner.capture.symbolic.builder import ProgramBuilder
from planner.capture.symbolic.size_family import SizeFamily
from planner.capture.techniques import recipe
from planner.errors import UsageError
from planner.jobs import (
    Batching,
    BatchShape,
    Job,
    Loss,
    Optimizer,
    SizeDistribution,
    at_size,
    draw_batches,
    load_distribution,
)
from planner.jobs.parse import parse_tensor_spec
from planner.planning.varying.advice import VaryingAdvice
from planner.planning.varying.plan import open_batches
from planner.planning.varying.process import VaryingProcess
from planner.planning.varying.programs import SizedPrograms
from planner.program import Target
from tests.helpers.models import on_meta

AMPERE = Target.for_capability((8, 6))
SIZES = "16..300x32"
MIB = 2**20


class Texts(nn.Module):
    """Attention with padded rows, a convolution of stride 2, and scores of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(32, 96)
        self.shrink = nn.Conv1d(32, 64, 3, stride=2, padding=1)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mask = x.new_zeros(x.shape[0], 1, x.shape[1], x.shape[1])
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        scores = torch.softmax(mixed @ mixed.transpose(1, 2), 2) @ mixed
        return self.head(self.shrink(scores.transpose(1, 2)).transpose(1, 2))


def job_of(**fields: Any) -> Job:
    """Three steps with Adam on samples of 16 to 300 rows."""
    given = {
        "inputs": (parse_tensor_spec(SIZES),),
        "loss": Loss.SUM,
        "optimizer": Optimizer.ADAM,
        "cudnn": "published",
    }
    return Job.create("texts", **given | fields)


build = on_meta(Texts)


def programs_of(job: Job) -> SizedPrograms:
    """The programs of the job at any size."""
    return SizedPrograms(job, load_distribution(job), AMPERE, lambda line: None, Texts)


def played(job: Job, by_step: Sequence[Sequence[BatchShape]]) -> VaryingProcess:
    """A process after these steps."""
    process = VaryingProcess(open_batches(job, programs_of(job)), UNLIMITED, by_step[0][0])
    for shapes in by_step:
        assert process.step(shapes)
    return process


def steps_of(sizes: Sequence[int], accumulate: int = 1) -> list[list[BatchShape]]:
    shapes = [BatchShape(2 + size % 5, (size,)) for size in sizes]
    return [shapes[start : start + accumulate] for start in range(0, len(shapes), accumulate)]


# ---- programs


def test_formulas_give_the_programs_of_runs() -> None:
    """Programs at sizes that no run has seen are those that runs there are fitted to, event by event."""
    job = job_of()
    family = SizeFamily(
        lambda size: ProgramBuilder(at_size(job, size), build, lambda line: None),
        tuple((size,) for size in range(16, 301)),
        AMPERE,
    )
    for size in ((31,), (100,), (130,), (248,)):
        program = family.program(size)
        assert size not in family.captured
        assert program is not None
        for batch in (2, 9):
            assert family.builder(size).divergence(program, batch, AMPERE) == ""


class Pictures(nn.Module):
    """Convolutions of stride 2, a square of all pixels, and rows and columns by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.shrink = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.shrink(x).flatten(2)
        scores = torch.softmax(pixels.transpose(1, 2) @ pixels, 2)
        return scores.sum((1, 2)) + x.sum(3).cumsum(2).sum((1, 2)) + x.sum(2).cumsum(2).sum((1, 2))


def test_formulas_in_two_sizes_give_the_programs_of_runs() -> None:
    """Where height and width differ, few pairs of both are captured, and the others are as runs there."""
    job = job_of(inputs=(parse_tensor_spec("3x32..160x48..192"),), pad_to=4)

    build_pictures = on_meta(Pictures)
    family = SizeFamily(
        lambda size: ProgramBuilder(at_size(job, size), build_pictures, lambda line: None),
        load_distribution(job).grid(),
        AMPERE,
    )
    for size in ((36, 180), (72, 100), (132, 56), (96, 96), (148, 164)):
        program = family.program(size)
        assert size not in family.captured
        assert program is not None
        assert family.builder(size).divergence(program, 9, AMPERE) == ""
    assert len(family.captured) < 40


# ---- sampled runs


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_that_of_a_loop_over_the_same_batches(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps put together from traces of single sizes take what a captured loop over the batches takes."""
    by_step = steps_of([40, 300, 17, 123, 124, 64, 299, 18, 77, 250], accumulate)
    job = job_of(accumulate=accumulate)
    shapes: Iterator[BatchShape] = iter([shape for shapes in by_step for shape in shapes])

    def loader_of(model: nn.Module, job: Job, batch: int) -> Any:
        def load() -> Any:
            shape = next(shapes)
            return batch_loader(model, at_size(ranged, shape.size), shape.batch)()

        return load

    ranged = job
    monkeypatch.setattr(recipe, "batch_loader", loader_of)
    whole = planner.capture.session.record(at_size(job, (16,)).replace(steps=len(by_step)), 2, (8, 6), build)
    monkeypatch.undo()
    expected, process = replay_trace(whole), played(job, by_step)
    found = process.replay(2)
    assert found.peak_allocated_bytes == expected.peak_allocated_bytes
    assert found.peak_reserved_bytes == expected.peak_reserved_bytes
    assert found.step_peaks == expected.step_peaks
    assert found.end_allocated_bytes == expected.end_allocated_bytes


def test_a_copied_process_goes_on_alike_and_by_itself() -> None:
    """A copy takes the same further steps as the process itself, and leaves it as it was."""
    process = played(job_of(), steps_of([200, 33, 90]))
    before, twin = process.replay(2), process.copy()
    assert twin.step(*steps_of([280]))
    assert process.replay(2) == before
    assert process.step(*steps_of([280]))
    assert process.replay(2) == twin.replay(2)
    assert process.reserved_bytes == twin.reserved_bytes


# ---- distributions


def test_a_file_counts_sizes(tmp_path: Path) -> None:
    """Lines are sizes, or sizes and counts; those outside of the range are cut or padded to it."""
    path = tmp_path / "lengths.csv"
    path.write_text("length,count\n20,3\n400,1\n100 # tokens\n\n5,2\n")
    sizes = load_distribution(job_of(sizes=str(path)))
    assert sizes.sizes == ((16,), (20,), (100,), (300,))
    assert sizes.cumulative == (2, 5, 6, 7)
    assert sizes.clipped == 3
    assert (sizes.smallest, sizes.largest) == ((16,), (300,))
    assert [sizes.share_below(size) for size in (16, 17, 100, 301)] == [0, 2 / 7, 5 / 7, 1]


def test_a_file_of_tokens(tmp_path: Path) -> None:
    """Lines may be objects with tokens or a length."""
    path = tmp_path / "tokens.jsonl"
    path.write_text('{"input_ids": [1, 2, 3, 4]}\n{"length": 40}\n')
    job = job_of(inputs=(parse_tensor_spec("2..50:int64"),), sizes=str(path))
    assert load_distribution(job).sizes == ((4,), (40,))


@pytest.mark.parametrize("text", ["", "# nothing\n", "12 3 4\n", "0\n", "12\nmany\n"])
def test_a_file_without_sizes_is_refused(text: str, tmp_path: Path) -> None:
    """A file that holds no sizes of such samples is refused in one line."""
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"^--sizes \S+.*$"):
        load_distribution(job_of(sizes=str(path)))


def test_an_array_has_the_sizes_of_samples(tmp_path: Path) -> None:
    """Each number is a sample; numbers with fractions, and others than whole files, are refused."""
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([20, 400, 20, 5]))
    sizes = load_distribution(job_of(sizes=str(path)))
    assert (sizes.sizes, sizes.cumulative, sizes.clipped) == (((16,), (20,), (300,)), (1, 3, 4), 2)
    np.save(path, np.array([1.5, 2.0]))
    with pytest.raises(UsageError, match="expected whole numbers, 1 for each sample, got float64"):
        load_distribution(job_of(sizes=str(path)))
    path.write_bytes(b"no array")
    with pytest.raises(UsageError, match="cannot be read"):
        load_distribution(job_of(sizes=str(path)))


def test_a_tokenized_dataset_has_the_sizes_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all splits, the lengths of `input_ids`; without the library the line says what to do."""

    class Split(dict[str, list[Any]]):
        @property
        def column_names(self) -> list[str]:
            return list(self)

    splits = {"train": Split(input_ids=[[1] * 20, [1] * 30]), "test": Split(input_ids=[[1] * 20])}
    library = SimpleNamespace(load_from_disk=lambda path: splits)
    monkeypatch.setitem(sys.modules, "datasets", library)
    sizes = load_distribution(job_of(sizes=str(tmp_path)))
    assert (sizes.sizes, sizes.cumulative) == (((20,), (30,)), (2, 3))
    splits["train"] = Split(text=["a"])
    with pytest.raises(UsageError, match="needs one range, and a column length or input_ids; it has text"):
        load_distribution(job_of(sizes=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="datasets is not installed"):
        load_distribution(job_of(sizes=str(tmp_path)))


def test_sizes_are_padded_to_a_multiple() -> None:
    """The share of samples below a padded size counts those that are padded to less."""
    sizes = SizeDistribution(((1, 100),), pad_to=8)
    assert sizes.largest == (104,)
    assert sizes.paddings() == tuple(range(8, 105, 8))
    assert sizes.share_below(16) == 0.08
    assert sizes.share_below(17) == sizes.share_below(24) == 0.16


def test_the_largest_of_a_batch_has_its_distribution() -> None:
    """The size of a batch is drawn as the largest of as many samples, with the mean of such."""
    sizes, random = SizeDistribution(((1, 100),)), Random(1)
    drawn = [sizes.draw_largest(random, 4)[0] for _ in range(20_000)]
    expected = sum(1 - (size / 100) ** 4 for size in range(100))
    assert abs(sum(drawn) / len(drawn) - expected) < 0.5


def test_batches_of_tokens_are_full() -> None:
    """Batches by tokens stay within them, and one more sample would not."""
    job = job_of(batching=Batching.TOKENS)
    shapes = draw_batches(job, load_distribution(job), 1000, 0, 50)
    assert all(shape.batch * shape.size[0] <= 1000 for shape in shapes)
    assert all((shape.batch + 1) * 300 > 1000 for shape in shapes)


def test_grouped_batches_begin_with_the_largest() -> None:
    """Grouped by size, the first batch is the largest of all and the sizes of a megabatch fall."""
    job = job_of(batching=Batching.GROUPED, run_steps=400)
    sizes = [shape.size for shape in draw_batches(job, load_distribution(job), 4, 0, 50)]
    assert sizes[0] == max(sizes)
    assert sizes[1:] == sorted(sizes[1:], reverse=True)


def test_draws_follow_the_seed() -> None:
    """Equal seeds and sequences give equal batches, others do not."""
    sizes = load_distribution(job_of())

    def drawn(seed: int, sequence: int) -> object:
        return draw_batches(job_of(seed=seed), sizes, 4, sequence, 20)

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(2, 0) != drawn(1, 1) != drawn(1, 0)


# ---- plans

OPTIONS: Any = {"input": SIZES, "loss": "sum", "cudnn": "published", "run_steps": 30, "gpu": "RTX 3090"}


def test_the_largest_batch_lives_and_the_next_does_not() -> None:
    """At the answer no sampled run exceeds the risk, at the next batch the runs do."""
    result = max_batch(Texts, **OPTIONS | {"allocator_cap_mib": 200})
    assert isinstance(result, VaryingResult)
    for side in result.plan.sides:
        assert side.at is not None and side.beyond is not None
        assert side.at.batch == side.largest
        assert side.at.probability <= result.plan.risk < side.beyond.probability
        assert side.at.peak_reserved_bytes <= 200 * MIB or side.expandable_segments


@pytest.mark.parametrize(("options", "step"), [({}, 6), ({"batching": "tokens"}, 192)])
def test_the_largest_multiple_lives_and_the_next_does_not(options: dict[str, Any], step: int) -> None:
    """Multiples of 6 are searched one by one; numbers of tokens are also multiples of 64."""
    result = max_batch(Texts, multiple_of=6, **OPTIONS | {"allocator_cap_mib": 200, **options})
    assert isinstance(result, VaryingResult)
    for side in result.plan.sides:
        assert side.at is not None and side.beyond is not None
        assert side.largest % 6 == 0
        assert (side.at.batch, side.beyond.batch) == (side.largest, side.largest + step)
        assert side.at.probability <= result.plan.risk < side.beyond.probability


@pytest.mark.slow
def test_several_gpus_have_the_answers_of_each() -> None:
    """The table of GPUs has the largest batch that `max_batch` finds on each; too many are refused."""
    capped = {**OPTIONS, "allocator_cap_mib": 200}
    del capped["gpu"]
    table = gpus(Texts, filter="4090", **capped).table
    alone = max_batch(Texts, gpu="RTX 4090", **capped)
    assert isinstance(alone, VaryingResult)
    own = next(fit for fit in table.fits if fit.budget.device.name.startswith("RTX 4090 "))
    assert own.max_batch == own.comfortable_batch == alone.answer_batch
    assert any("runs of 30 steps" in note for note in table.notes)
    with pytest.raises(UsageError, match="choose with --filter, or give one size"):
        gpus(Texts, **capped)


@pytest.mark.slow
def test_an_estimate_says_in_which_step_a_run_dies() -> None:
    """Where the memory ends within the sampled steps, the run names the first that fails."""
    largest = max_batch(Texts, **OPTIONS | {"allocator_cap_mib": 200})
    assert isinstance(largest, VaryingResult)
    result = estimate(Texts, 2 * largest.answer_batch, **OPTIONS | {"allocator_cap_mib": 200})
    assert isinstance(result, VaryingResult)
    assert result.fits == "no"
    at = result.plan.sides[0].at
    assert at is not None
    assert at.probability == 1
    assert any(run.failed_step is not None for run in at.runs)


def test_sizes_that_rarely_come_count_by_their_probability(tmp_path: Path) -> None:
    """A size that no sequence draws counts as often as a run of all steps would draw it."""
    path = tmp_path / "lengths.txt"
    path.write_text("16 999999999\n300 1\n")
    options = OPTIONS | {"allocator_cap_mib": 60, "sizes": str(path)}
    at_rare = max_batch(Texts, **options)
    at_short = max_batch(Texts, **options | {"sizes": "uniform", "input": "16x32", "run_steps": None})
    assert isinstance(at_rare, VaryingResult)
    risk = at_rare.plan.sides[0].at
    assert risk is not None
    critical = risk.runs[0].critical
    assert critical == (300,)
    assert risk.probability == pytest.approx(1 - (1 - 1e-9) ** (30 * risk.batch))
    assert at_rare.answer_batch == at_short.max_batch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": "16x32", "pad_to": 8}, "--pad-to: all samples have one size"),
        ({"evaluate": True}, "--evaluate: not planned together"),
        ({"dataset_size": 100}, "--dataset-size: not planned together"),
        ({"isolate": True}, "--isolate: not with samples of many sizes"),
    ],
)
def test_what_is_not_planned_together_is_refused(options: dict[str, Any], message: str) -> None:
    """Options that have no meaning beside samples of many sizes, or without them, are refused."""
    with pytest.raises(UsageError, match=message):
        max_batch(Texts, **OPTIONS | options)


def test_other_commands_refuse_many_sizes() -> None:
    """A command that plans one size refuses a range in one line."""
    with pytest.raises(UsageError, match=r"give one size here, such as 300x32$"):
        compare(Texts, 2, **OPTIONS)
    with pytest.raises(UsageError, match="--against: a recording is of samples of one size"):
        explain(Texts, 2, against=lambda job, batch: Recording(()), **OPTIONS)


@pytest.mark.slow
def test_an_explanation_is_of_the_worst_batch() -> None:
    """The batch of the highest step is attributed at its own size; other sizes add what the run reserves."""
    result = explain(Texts, 16, **OPTIONS)
    assert isinstance(result, VaryingExplainResult)
    at = result.plan.sides[0].at
    assert at is not None
    run = at.runs[result.sequence]
    peaks = [peaks.allocated_bytes for peaks in run.replay.step_peaks]
    assert peaks[run.worst_step - 1] == max(peaks) == at.peak_allocated_bytes
    drawn = draw_batches(job_of(run_steps=30), load_distribution(job_of()), 16, result.sequence, 30)
    assert run.worst == drawn[run.worst_step - 1]
    assert result.estimate.job == at_size(result.plan.job, run.worst.size)
    alone = estimate(Texts, 16, **OPTIONS | {"input": f"{run.worst.size[0]}x32", "run_steps": None})
    assert isinstance(alone, EstimateResult)
    assert result.explanation.run == alone.estimate.run
    json = result.to_dict()
    added = run.replay.peak_reserved_bytes - result.explanation.run.peak_reserved_bytes
    assert json["worst"]["added_by_other_sizes_mib"] == round(added / MIB, 3)
    assert f"16x{run.worst.size[0]}, in step {run.worst_step} of sequence {result.sequence}" in str(result)


@pytest.mark.slow
def test_advice_plays_each_change() -> None:
    """Each change has the largest batch that `max_batch` finds with it; the asked batch is judged by it."""
    options = OPTIONS | {"allocator_cap_mib": 60, "run_steps": 4, "precision": "bf16"}
    options |= {"mode": "infer", "loss": None}
    asked = max_batch(Texts, **options).answer_batch + 1
    result = advise(Texts, asked, **options)
    assert isinstance(result, VaryingAdviceResult)
    singles = {one.changes[0].name: one for one in result.advice.singles}
    for name, given in {
        "--batching grouped": {"batching": "grouped"},
        "--input with 16..286 in place of 16..300": {"input": "16..286x32"},
    }.items():
        assert singles[name].side.largest == max_batch(Texts, **options | given).answer_batch
    assert not result.advice.unchanged.fits
    assert all(
        one.fits == (one.side.largest >= asked) for one in singles.values() if one.training.batch == asked
    )
    assert result.possible == any(one.fits for one in singles.values())
    assert f"Batch {asked} does not fit" in str(result)
    assert result.to_dict()["unchanged"]["fits"] is False


@pytest.mark.slow
def test_advice_without_a_batch_compares_the_largest() -> None:
    """Without a batch size nothing is judged, and each change has its largest batch."""
    advice = advise(Texts, **OPTIONS | {"allocator_cap_mib": 60, "run_steps": 4, "pad_to": 64}).advice
    assert isinstance(advice, VaryingAdvice)
    assert advice.batch is None and advice.together is None
    assert all(one.asked is None and one.side.largest for one in advice.singles)


@pytest.mark.slow
def test_limits_without_memory_for_the_model() -> None:
    """Where the model itself has no memory, no batch lives."""
    result = max_batch(Texts, **OPTIONS | {"allocator_cap_mib": 2})
    assert isinstance(result, VaryingResult)
    assert result.answer_batch == 0
    assert MemoryLimits(limit_bytes=2 * MIB).allocator_limit_bytes == 2 * MIB
