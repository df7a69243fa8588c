"""Shape, dtype and source line of blocks, as the recorder collects them on request."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.capture.recorder.provenance import ProvenanceCollector, short_path
from planner.capture.session import record
from planner.jobs import Job, Mode
from planner.program.events import Alloc, Phase, PhaseStart, TensorProvenance, Trace, validate
from planner.program.extrapolation.fit import fit_traces
from tests.helpers.models import AMPERE, job_of, on_meta, trace_of
from tests.helpers.structs import replace
from tests.helpers.traces import load_trace, save_trace


class Net(nn.Module):
    """Two layers and an activation, each on a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        active = hidden.exp()
        return self.second(active)


class Checkpointed(Net):
    """The network with its inner part run again in the backward pass."""

    def inner(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return hidden.exp()

    def forward(self, x: Tensor) -> Any:
        return self.second(checkpoint(self.inner, x, use_reentrant=False))


def detailed(build: Callable[[], nn.Module], job: Job, batch: int) -> Trace:
    """The trace with details."""
    return record(job, batch, AMPERE, on_meta(build), ProvenanceCollector())


def lines_of(trace: Trace, phase: Phase, op: str) -> list[tuple[tuple[int, ...], str]]:
    """Shape and source line of the blocks of operators with `op` in their name in a phase."""
    details = {detail.block: detail for detail in trace.provenance}
    lines = []
    now = Phase.SETUP
    for event in trace.events:
        if isinstance(event, PhaseStart):
            now = event.phase
        elif isinstance(event, Alloc) and now is phase and op in trace.sites[event.site].op:
            detail = details.get(event.block, TensorProvenance(event.block, (), "", "", ""))
            lines.append((detail.shape, detail.code))
    return lines


JOB = job_of("4", mode=Mode.TRAIN, steps=1)


def test_a_forward_pass_knows_its_lines() -> None:
    """Each result has its shape, its dtype, and the line of the model that called its operator."""
    taken = detailed(Net, JOB, 3)
    assert lines_of(taken, Phase.FORWARD, "exp") == [((3, 8), "active = hidden.exp()")]
    results = [line for line in lines_of(taken, Phase.FORWARD, "addmm") if line[0]]
    assert results == [((3, 8), "hidden = self.first(x)"), ((3, 2), "return self.second(active)")]
    (exp,) = [
        detail for detail in taken.provenance if detail.code == "active = hidden.exp()" and detail.shape
    ][:1]
    number = 1 + Path(__file__).read_text(encoding="utf-8").splitlines().index(
        "        active = hidden.exp()"
    )
    assert (exp.dtype, exp.source) == ("float32", f"{short_path(__file__)}:{number}")


def test_a_backward_pass_knows_the_lines_of_its_forward() -> None:
    """A block of autograd is reported with the line whose operator it differentiates."""
    taken = detailed(Net, JOB, 3)
    assert lines_of(taken, Phase.BACKWARD, "aten.mul") == [((3, 8), "active = hidden.exp()")]
    products = [line for line in lines_of(taken, Phase.BACKWARD, "aten.mm") if line[0]]
    assert products == [
        ((3, 8), "return self.second(active)"),
        ((2, 8), "return self.second(active)"),
        ((8, 4), "hidden = self.first(x)"),
    ]


def test_a_checkpoint_runs_its_own_lines_again() -> None:
    """In the backward pass a checkpoint's lines stand on the stack and are reported themselves."""
    taken = detailed(Checkpointed, JOB, 3)
    assert lines_of(taken, Phase.BACKWARD, "aten.exp") == [((3, 8), "return hidden.exp()")]
    assert lines_of(taken, Phase.BACKWARD, "aten.mul") == [((3, 8), "return hidden.exp()")]


def test_what_no_tensor_holds_has_a_line_and_no_dtype() -> None:
    """cuBLAS's workspace is reported with the line of the first product."""
    taken = detailed(Net, JOB, 3)
    details = {detail.block: detail for detail in taken.provenance}
    held = [
        details[event.block]
        for event in taken.events
        if isinstance(event, Alloc) and event.category == "workspaces"
    ]
    assert [(detail.shape, detail.dtype, detail.code) for detail in held][0] == (
        (),
        "",
        "hidden = self.first(x)",
    )


def test_the_loop_itself_has_no_line() -> None:
    """Weights and the batch come from no line of the model, but have shapes."""
    taken = detailed(Net, JOB, 3)
    assert lines_of(taken, Phase.SETUP, "to") == [((8, 4), ""), ((8,), ""), ((2, 8), ""), ((2,), "")]
    assert lines_of(taken, Phase.INPUTS, "empty") == [((3, 4), "")]


def test_details_change_nothing_else() -> None:
    """With and without details the events and sites are the same, and plans get none."""
    plain, taken = trace_of(Net, JOB, 3), detailed(Net, JOB, 3)
    assert plain.provenance == ()
    assert replace(taken, provenance=()) == plain


def test_a_program_has_no_details() -> None:
    """A fit drops them, as shapes hold for one batch size."""
    assert fit_traces(detailed(Net, JOB, 2), detailed(Net, JOB, 3)).provenance == ()


def test_details_survive_a_file(tmp_path: Path) -> None:
    """A trace with details is read back whole, and so is one without."""
    path = tmp_path / "x.trace"
    for trace in (detailed(Net, JOB, 3), trace_of(Net, JOB, 3)):
        save_trace(trace, path, {})
        assert load_trace(path) == (trace, {})


@pytest.mark.parametrize(
    "details",
    [[1], [0, 0]],
)
def test_validate_refuses_provenance_of_nothing(details: list[int]) -> None:
    """Provenance of no block, or twice of one, is a flaw."""
    plain = trace_of(Net, JOB, 2)
    born = [event.block for event in plain.events if isinstance(event, Alloc)]
    blocks = [born[0] if number == 0 else max(born) + 1 for number in details]
    provenance = tuple(TensorProvenance(block, (1,), "float32", "", "") for block in blocks)
    with pytest.raises(ValueError, match="provenance is of one block each, and of blocks that are allocated"):
        validate(replace(plain, provenance=provenance))


def test_a_path_is_shown_as_python_imports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path begins at the deepest folder of the search path, else the working directory, or is a name."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    file = tmp_path / "a" / "b" / "c.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    assert short_path(str(file)) == "a/b/c.py"
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    assert short_path(str(file)) == "b/c.py"
    assert short_path("/nowhere/on/the/path.py") == "path.py"
