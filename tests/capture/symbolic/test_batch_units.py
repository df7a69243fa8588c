"""Programs of steps that refuse small batches, split them, or compare pairs of samples."""

from pathlib import Path

import pytest

from planner.capture.models.registry import build_model
from planner.capture.symbolic import builder as builder_module
from planner.capture.symbolic.builder import ProgramBuilder
from planner.errors import ModelError
from planner.program import ignore_progress
from planner.program.program import AffineAlloc, Program
from planner.program.target import Target
from planner.store.codec import load_programs, save_programs
from tests.capture.models.test_own_step import job_of_code
from tests.helpers.models import AMPERE

pytestmark = pytest.mark.slow

TARGET = Target.for_capability(AMPERE)
HEAD = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step(x):
    x = x.to(device)
"""
FOUR_PARTS = """
    for start in range(0, len(x), len(x) // 4):
        model(x[start : start + len(x) // 4]).sum().backward()
"""
TEN_SAMPLES = """
    model(x).sum(1).topk(10).values.sum().backward()
"""
FIRST_QUARTER = """
    model(x[: len(x) // 4]).sum().backward()
"""
PAIRS = """
    out = model(x)
    logits = out @ out.T
    logits[~torch.eye(len(x), dtype=torch.bool, device=device)].view(len(x), -1).logsumexp(1).sum().backward()
"""
UP_TO_500 = """
    queue = torch.zeros(500, 8, device=device)
    queue[: len(x)] = model(x).detach()
"""
REFUSES_ALL = """
    raise ValueError(f"{model}: no batch is right")
"""


def builder_of(folder: Path, body: str) -> ProgramBuilder:
    job = job_of_code(folder, HEAD + body, "train_step", "64")
    return ProgramBuilder(job, build_model, ignore_progress)


@pytest.mark.parametrize(
    ("body", "unit", "least", "others"),
    [(FOUR_PARTS, 4, 8, (12, 100)), (TEN_SAMPLES, 1, 16, (17, 77)), (FIRST_QUARTER, 4, 8, (16, 40))],
)
def test_units_fit_a_step_that_splits_its_batch(
    tmp_path: Path, body: str, unit: int, least: int, others: tuple[int, ...]
) -> None:
    """The program is that of runs at multiples of the smallest unit, and of no other batch sizes."""
    builder = builder_of(tmp_path, body)
    (program,) = builder.programs(TARGET)
    assert (program.unit, program.targets[AMPERE].min_batch) == (unit, least)
    assert f"from {least} on" in program.notes[-1]
    most = program.targets[AMPERE].max_batch
    for batch in others:
        assert not builder.divergence(program, batch, TARGET)
    program.targets[AMPERE].max_batch = most
    assert program.covers(8 * unit * least, TARGET)
    assert unit == 1 or not program.covers(8 * unit * least + 1, TARGET)


def test_pairs_of_samples_fit_squares(tmp_path: Path) -> None:
    """A matrix of all pairs takes four bytes for each, its mask's rest so many less."""
    builder = builder_of(tmp_path, PAIRS)
    (program,) = builder.programs(TARGET)
    sizes = {
        (event.fixed_bytes, event.bytes_per_sample, event.bytes_per_pair)
        for event in program.events
        if isinstance(event, AffineAlloc)
    }
    assert {(0, 0, 4), (0, -4, 4), (0, 0, 1)} <= sizes
    assert not builder.divergence(program, 33, TARGET)


@pytest.mark.parametrize("body", [FOUR_PARTS, PAIRS])
def test_files_hold_units_and_squares(tmp_path: Path, body: str) -> None:
    """Reading gives what was written, at each batch size."""
    builder = builder_of(tmp_path, body)
    (program,) = builder.programs(TARGET)
    builder.enumerate_variants(program, TARGET)
    save_programs([program], tmp_path / "program", {})
    ((encoded),) = load_programs(tmp_path / "program").programs
    assert encoded.load_target(AMPERE)
    read: Program = encoded.program
    assert (read.events, read.unit) == (program.events, program.unit)
    assert read.specialize(48, TARGET) == program.specialize(48, TARGET)


def test_a_step_that_refuses_all_batches_tells_of_the_smallest(tmp_path: Path) -> None:
    """The error is that of batch 2, not of the units that were tried."""
    with pytest.raises(ModelError, match="fails at batch 2"):
        builder_of(tmp_path, REFUSES_ALL).programs(TARGET)


def test_a_run_beyond_the_range_widens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs beyond a range, the first makes the second needless, and one that is refused stays so."""
    monkeypatch.setattr(builder_module, "STEP_VALIDATION_BYTES", (2**16,))
    builder = builder_of(tmp_path, UP_TO_500)
    (program,) = builder.programs(TARGET)
    variants = program.targets[AMPERE]
    assert variants.max_batch < 500
    assert builder.run(500, TARGET) is program
    assert variants.max_batch == 500
    assert program.covers(499, TARGET)
    with pytest.raises(ModelError):
        builder.run(501, TARGET)
