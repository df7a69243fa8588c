"""A saved trace plans in a Python that has nothing but the standard library."""

import subprocess
import sys
from pathlib import Path

import pytest
from handmade import SITES

from planner.allocator_rules import MIB
from planner.events import Alloc, Free, Mark, Phase, Role, Trace
from planner.trace_file import save_trace

ROOT = Path(__file__).parents[1]
TRACE = Trace(
    events=(
        Mark(0, Phase.SETUP),
        Alloc(0, 97 * MIB, 0, Role.PARAMETER, 0),
        Mark(1, Phase.FORWARD),
        Alloc(1, 0, 602_112, Role.INPUT, 0),
        Alloc(2, 100, 51_380_224, Role.ACTIVATION, 1),
        Mark(1, Phase.BACKWARD),
        Alloc(3, 97 * MIB, 0, Role.GRADIENT, 2),
        Free(2),
        Mark(1, Phase.END),
    ),
    sites=SITES,
    batches=(2, 3, 64),
    unknown_ops=("aten.mystery",),
    notes=("made up",),
)
PLAN = """
from dataclasses import replace
from pathlib import Path
from planner.allocator_rules import parse_alloc_conf
from planner.budget import make_budget
from planner.device import generic_device
from planner.job import Job
from planner.plan import Seconds, estimate
from planner.replay import replay
from planner.search import largest
from planner.trace_file import load_trace

trace, about = load_trace(Path(path))
budget = make_budget(generic_device(8000), 0.99, parse_alloc_conf("roundup_power2_divisions:8"))
found = largest(lambda batch: replay(trace, batch, budget.arena).outcome)
job = Job(about["model"])
estimates = [estimate(job, trace, batch, budget) for batch in (found.largest, found.first_failure)]
print(about, found, *(replace(each, seconds=Seconds(0, 0)) for each in estimates), sep="\\n")
"""
BARE = """
import sys
path, root = sys.argv[1:]
sys.path.insert(0, root)
sys.modules["torch"] = None
try:
    import torch
except ImportError:
    pass
else:
    sys.exit("torch can be imported")
"""


def test_saved_trace_plans_without_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where torch and all other packages are missing, a saved trace gives the same search and estimates."""
    path = tmp_path / "job.trace"
    save_trace(TRACE, path, {"model": "made up"})
    exec(PLAN, {"path": path})
    here = capsys.readouterr().out
    bare = [sys.executable, "-I", "-S", "-c", BARE + PLAN, str(path), str(ROOT)]
    done = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, here, "")
    assert "Search(largest=" in here and "outcome=<Outcome.DOES_NOT_FIT: 'no'>" in here
