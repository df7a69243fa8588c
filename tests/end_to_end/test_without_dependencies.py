"""A saved trace plans without torch and what comes with it, and without the command line's libraries."""

import subprocess
import sys
from pathlib import Path

import pytest

from planner.allocator.config import MIB
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart
from planner.program.program import AffineAlloc
from tests.helpers.traces import program_of, save_trace

ROOT = Path(__file__).parents[2]
TRACE = program_of(
    (
        PhaseStart(0, Phase.SETUP),
        Alloc(0, 97 * MIB, Category.PARAMETER, 0),
        PhaseStart(1, Phase.FORWARD),
        AffineAlloc(1, 0, 602_112, Category.INPUT, 0),
        AffineAlloc(2, 100, 51_380_224, Category.ACTIVATION, 1),
        PhaseStart(1, Phase.BACKWARD),
        Alloc(3, 97 * MIB, Category.GRADIENT, 2),
        Free(2),
        PhaseStart(1, Phase.END),
    ),
    unknown_ops=("aten.mystery",),
    notes=("made up",),
)
PLAN = """
from msgspec.structs import replace
from pathlib import Path
from planner.allocator.config import parse_alloc_conf
from planner.hardware.budget import make_budget
from planner.hardware.device import generic_device
from planner.jobs import Job
from planner.planning.estimate import Seconds, estimate_batch
from planner.allocator.replay import replay_trace
from planner.planning.search.boundary import largest
from planner.store.codec import load_programs

file = load_programs(Path(path))
program, about = file.programs[0].program, file.about
budget = make_budget(generic_device(8000), 0.99, parse_alloc_conf("roundup_power2_divisions:8"))
search = largest(lambda batch: replay_trace(program.instantiate(batch), budget.limits).outcome)
job = Job.create(about["model"])
batches = (search.largest, search.first_failure)
estimates = [estimate_batch(job, program.instantiate(batch), budget) for batch in batches]
print(about, search, *(replace(each, seconds=Seconds(0, 0)) for each in estimates), sep="\\n")
"""
BARE = """
import sys
path, root = sys.argv[1:]
sys.path.insert(0, root)
for name in ("torch", "torchvision", "numpy", "scipy", "typer", "click", "rich", "yaml", "pynvml"):
    sys.modules[name] = None
"""


def test_saved_trace_plans_without_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without torch, numpy, PyYAML and typer a saved trace gives the same search and estimates."""
    path = tmp_path / "job.trace"
    save_trace(TRACE, path, {"model": "made up"})
    exec(PLAN, {"path": path})
    here = capsys.readouterr().out
    bare = [sys.executable, "-I", "-c", BARE + PLAN, str(path), str(ROOT)]
    done = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, here, "")
    assert "Search(largest=" in here and "outcome=<Outcome.DOES_NOT_FIT: 'no'>" in here
