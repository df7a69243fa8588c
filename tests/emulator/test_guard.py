"""`planner.guard` around ordinary loops on an emulated GPU, whose peaks are called emulated."""

from pathlib import Path

import pytest

from tests.emulator.test_emulated_training import Emulator, emulator  # noqa: F401

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("importable_planner")]

SCRIPT = """
import json, warnings, planner
from pathlib import Path

def parts(width, batch):
    torch.cuda.empty_cache()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, width), torch.nn.ReLU(),
                                torch.nn.Linear(width, 10)).cuda()
    data = [(torch.randn(batch, 3, 64, 64), torch.randint(10, (batch,))) for _ in range(2)]
    return model, torch.optim.Adam(model.parameters()), data

def loop(model, optimizer, data, steps=4, autocast=False, scaler=None):
    for step in range(steps):
        x, y = data[step % 2]
        x, y = x.cuda(), y.cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output = model(x)
            loss = torch.nn.functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()

def note(**values):
    with Path("seen.jsonl").open("a") as file:
        file.write(json.dumps(values) + "\\n")

def figures(guard):
    told = guard.result.to_dict()
    names = "steps errors holds measured emulated stored out_of_memory"
    return {key: told[key] for key in names.split()}
"""


def lines(emulator: Emulator, code: str, gpu: str = "RTX 3060") -> list[dict[str, object]]:  # noqa: F811
    """Return what a script notes."""
    import json

    done = emulator.start(SCRIPT + code, "--gpu", gpu)
    seen = Path(str(emulator._folder)) / "seen.jsonl"
    assert seen.exists(), done.stderr
    return [json.loads(line) for line in seen.read_text(encoding="utf-8").splitlines()]


def test_peaks_are_as_planned(emulator: Emulator) -> None:  # noqa: F811
    """Allocated and reserved peaks of a loop equal its plan, and nothing is called measured."""
    code = """
model, optimizer, data = parts(2048, 64)
before = torch.cuda.memory_allocated(), torch.get_rng_state().sum().item()
with planner.guard(model, optimizer, data[0], store="kept") as guard:
    after = torch.cuda.memory_allocated(), torch.get_rng_state().sum().item()
    loop(model, optimizer, data)
note(same=before == after, hooks=len(optimizer._optimizer_step_post_hooks), **figures(guard))
"""
    (seen,) = lines(emulator, code)
    assert (seen["same"], seen["hooks"], seen["steps"], seen["holds"]) == (True, 0, 4, True)
    assert seen["errors"] == {"allocated": 0.0, "reserved": 0.0, "process": 0.0}
    assert seen["measured"] is None and seen["emulated"]["retries"] == 0  # type: ignore[index]
    assert str(seen["stored"]).startswith("kept/runs/")


def test_what_cannot_fit_is_refused_before_the_first_step(emulator: Emulator) -> None:  # noqa: F811
    """The error names batch, GPU and the largest batch; with on_misfit="warn" the loop dies by itself."""
    code = """
model, optimizer, data = parts(64, 8)
batch = torch.empty(400_000, 3, 64, 64, device="meta"), torch.empty(400_000, dtype=torch.int64, device="meta")
try:
    planner.guard(model, optimizer, batch)
except planner.DoesNotFitError as error:
    note(text=str(error), steps=len(optimizer.state))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    try:
        with planner.guard(model, optimizer, batch, on_misfit="warn") as guard:
            torch.empty(400_000 * 3 * 64 * 64, device="cuda")
    except torch.OutOfMemoryError:
        warned, places = [str(one.message) for one in seen], [one.filename for one in seen]
        note(warned=warned, places=places, **figures(guard))
"""
    refused, warned = lines(emulator, code)
    text = str(refused["text"])
    assert text.startswith("Sequential at batch 400,000 on RTX 3060 12GB most likely does not fit: it takes")
    assert "; the largest batch that fits is " in text and refused["steps"] == 0
    assert warned["out_of_memory"] is True and "most likely does not fit" in str(warned["warned"])
    assert all(place.endswith("train.py") for place in warned["places"])  # type: ignore[attr-defined]


def test_errors_pass_and_guards_nest(emulator: Emulator) -> None:  # noqa: F811
    """Whatever ends a body ends the with statement, and an inner guard takes nothing from the outer one."""
    code = """
model, optimizer, data = parts(1024, 16)
other, second, smaller = parts(64, 8)
for error in (ValueError("mine"), KeyboardInterrupt()):
    try:
        with planner.guard(model, optimizer, data[0]) as guard:
            loop(model, optimizer, data)
            raise error
    except (ValueError, KeyboardInterrupt) as caught:
        note(same=caught is error, **figures(guard))
with planner.guard(model, optimizer, data[0]) as outer:
    loop(model, optimizer, data)
    with planner.guard(other, second, smaller[0]) as inner:
        loop(other, second, smaller, 1)
note(outer=outer.result.observation.peak_allocated_bytes, inner=inner.result.observation.peak_allocated_bytes,
     steps=[outer.result.steps, inner.result.steps])
"""
    *errors, nested = lines(emulator, code)
    assert [seen["same"] for seen in errors] == [True, True]
    assert [seen["steps"] for seen in errors] == [4, 4]
    peak = round(nested["outer"] / 2**20, 3)  # type: ignore[operator]
    assert peak == errors[1]["emulated"]["peak_allocated_mib"]  # type: ignore[index]
    assert nested["inner"] < nested["outer"] and nested["steps"] == [4, 1]  # type: ignore[operator]


def test_what_cannot_be_planned_goes_on(emulator: Emulator) -> None:  # noqa: F811
    """A model whose forward pass fails on meta is warned of, runs, and is measured without a plan."""
    code = """
class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        if x.device.type == "meta" or not x.data_ptr():
            raise RuntimeError("no values, no answer")
        return self.layer(x).sum()
model = Odd().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    with planner.guard(model, optimizer, torch.randn(4, 8), step=lambda model, x: model(x)) as guard:
        for _ in range(3):
            model(torch.randn(4, 8, device="cuda")).backward()
            optimizer.step()
note(warned=[str(one.message) for one in seen], planned=guard.plan is not None, **figures(guard))
"""
    (seen,) = lines(emulator, code)
    assert len(seen["warned"]) == 1  # type: ignore[arg-type]
    assert seen["warned"][0].startswith("planner.guard: no plan, the training goes on: ")  # type: ignore[index]
    assert (seen["planned"], seen["steps"], seen["errors"], seen["holds"]) == (False, 3, {}, None)
    assert seen["emulated"]["peak_allocated_mib"] > 0  # type: ignore[index]


def test_autocast_around_is_planned(emulator: Emulator) -> None:  # noqa: F811
    """The plan of a guard within an autocast region is in mixed precision, and its peaks hold."""
    code = """
model, optimizer, data = parts(1024, 64)
with torch.autocast("cuda", torch.bfloat16):
    with planner.guard(model, optimizer, data[0]) as guard:
        loop(model, optimizer, data, autocast=True)
note(precision=guard.plan.job.loop.precision, **figures(guard))
"""
    (region,) = lines(emulator, code)
    assert region["precision"] == "amp-bf16" and region["errors"]["allocated"] == 0.0  # type: ignore[index]
