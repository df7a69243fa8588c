"""`planner.watch` and `planner diagnose` after a script that runs out of memory on an emulated GPU."""

import json
from pathlib import Path

import pytest

import planner
from planner.api.diagnose import DiagnoseResult
from tests.emulator.test_emulated_training import Emulator, emulator  # noqa: F401

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("importable_planner")]

GROWS = """
import planner

def train():
    model = torch.nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    for step in range(50):
        x = torch.randn(65536, 4096, device="cuda")
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(x)

with planner.watch(record={record}):
    train()
"""


def test_a_recorded_history_names_the_line_that_grows(
    emulator: Emulator,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The snapshot that the failing script left tells that each step keeps its batch, and where."""
    done = emulator.start(GROWS.format(record=True), "--gpu", "RTX 3060")
    (snapshot,) = tmp_path.glob("out-of-memory-*.pickle")
    assert "The memory in use grew until it ended" in done.stderr and "OutOfMemoryError" in done.stderr
    found = planner.diagnose(snapshot).to_dict()
    assert (found["cause"], found["requested_mib"]) == ("growth", 1024)
    assert found["site"]["line"].endswith("in train") and found["live"][0]["blocks"] == 10


def test_the_same_death_from_its_log_and_from_its_record(
    emulator: Emulator,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The record of the run sees the growth in its steps; the message has the figures of its moment alone."""
    done = emulator.start(GROWS.format(record=False), "--gpu", "RTX 3060")
    log, record = tmp_path / "log.txt", tmp_path / "run.json"
    log.write_text(done.stderr)
    record.write_text(done.stdout)
    by_log, by_record = planner.diagnose(log).to_dict(), planner.diagnose(record).to_dict()
    assert json.loads(done.stdout)["failure"]["requested_mib"] == by_record["requested_mib"] == 1024
    assert (by_record["cause"], by_log["requested_mib"]) == ("growth", 1024)
    assert by_log["site"]["line"].endswith("in train")
    assert isinstance(planner.diagnose(log), DiagnoseResult)


CATEGORIES = """
torch.cuda.memory._record_memory_history()
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(8192, 1024, device="cuda")).relu().sum().backward()
    optimizer.step()
torch.cuda.memory._dump_snapshot("snapshot.pickle")
"""


def test_a_snapshot_tells_parameters_gradients_and_state(
    emulator: Emulator,  # noqa: F811
    tmp_path: Path,
) -> None:
    """At the peak, in the second backward pass, the gradients of step 1 and the inputs of layers live too."""
    emulator.start(CATEGORIES, "--gpu", "RTX 3060")
    diagnosis = planner.diagnose(tmp_path / "snapshot.pickle").to_dict()
    found = {one["what"]: one["mib"] for one in diagnosis["by_category"]}
    weights = 4 * (1024 * 1024 + 1024) * 4 / 2**20
    assert found["parameters"] == pytest.approx(weights, rel=1e-3)
    assert found["optimizer"] == pytest.approx(2 * weights, rel=1e-3)
    assert found["gradients"] > weights and found["activations"] > 3 * 32
