"""The answer is the largest batch that runs at full speed; what fits by retries stands beside it."""

import json
from itertools import pairwise

import pytest

from planner import advise, estimate, gpus, max_batch
from planner.allocator.config import MemoryLimits
from planner.allocator.replay import replay_trace
from planner.cli import run
from planner.errors import UsageError
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.planning.retry_cost import RetryCost, count_retries
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace
from planner.report.commands.estimates.verdict import retries_text

RESNET = ["max-batch", "--model", "torchvision:resnet18", "--gpu", "L4"]
# Two steps, in each of which a block is larger than what the one before it has left.
GROWING = Trace(
    (
        *(PhaseStart(0, Phase.SETUP), Alloc(0, 30 * MIB, Category.PARAMETER, 0)),
        *(PhaseStart(1, Phase.FORWARD), Alloc(1, 40 * MIB, Category.TEMPORARY, 0), Free(1)),
        *(Alloc(2, 50 * MIB, Category.TEMPORARY, 0), Free(2)),
        *(
            PhaseStart(2, Phase.FORWARD),
            Alloc(3, 55 * MIB, Category.TEMPORARY, 0),
            PhaseStart(2, Phase.END),
        ),
    ),
    (Site("", "to"),),
    1,
)


def both_batches() -> tuple[int, int]:
    """The largest without retries, and the largest: of ResNet-18 on an L4 they lie far apart."""
    result = max_batch("torchvision:resnet18", gpu="L4")
    assert 1.3 * result.comfortable_batch < result.max_batch
    return result.comfortable_batch, result.max_batch


def test_the_report_leads_with_full_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """The largest batch without retries stands first, then what fits with some; both are shown in full."""
    at_ease, retrying = both_batches()
    assert run(RESNET) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Largest batch:  {at_ease} at confidence 0.99, without retries"
    assert lines[1].startswith(f"With retries:   {retrying}, at the cost of retries: ")
    assert f"at batch {at_ease}, " in next(line for line in lines if line.startswith("Risk:"))
    titles = [line.split("  ")[0] for line in lines if line.startswith("Batch ")]
    assert titles[:2] == [f"Batch {at_ease}", f"Batch {retrying}, with retries"]


def test_both_estimates_are_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`max_batch` and `at_max` mean what they did; the comfortable batch has an estimate of its own."""
    at_ease, retrying = both_batches()
    assert run([*RESNET, "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert (fields["max_batch"], fields["comfortable_batch"], fields["answer_batch"]) == (
        retrying,
        at_ease,
        at_ease,
    )
    large, small = fields["at_max"], fields["at_comfortable"]
    assert (large["batch"], large["fits"], small["batch"], small["fits"]) == (
        retrying,
        "with_retries",
        at_ease,
        "yes",
    )
    assert sum(cost["retries"] for cost in large["retry_costs"]) == large["retries"] > 0
    assert small["retry_costs"] == [] and small["p_out_of_memory"] < large["p_out_of_memory"]


@pytest.mark.slow
def test_the_comfortable_estimate_is_the_one_of_that_batch() -> None:
    """The estimate equals that of `planner estimate`, and the next batch size takes retries."""
    at_ease, _ = both_batches()
    fields = max_batch("torchvision:resnet18", gpu="L4").to_dict()["at_comfortable"]
    alone, above = (estimate("torchvision:resnet18", size, gpu="L4") for size in (at_ease, at_ease + 1))
    for each in (fields, single := alone.to_dict()):
        del each["seconds"]
    assert fields == single
    assert above.fits == "with_retries"


@pytest.mark.slow
def test_one_estimate_where_both_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """If the largest batch takes no retries, none are mentioned."""
    assert run(["max-batch", "--model", "vit_b_16", "--gpu", "L4"]) == 0
    out = capsys.readouterr().out
    assert "retries" not in out and out.count("peak reserved") == 1


@pytest.mark.parametrize(("mib", "plain", "strict"), [(90, 0, 1), (140, 0, 0), (60, 1, 1)])
def test_no_retries_decides_the_exit_code(
    mib: int, plain: int, strict: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A batch that takes retries is no answer then: exit code 1 where there is no other."""
    file = tmp_path_factory.mktemp("model") / "model.py"
    file.write_text(
        "from torch import nn\n\nclass Wide(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.scale = nn.Linear(1, 1)\n\n    def forward(self, x):\n"
        "        first = x.new_empty(10 * 2**20)\n        del first\n"
        "        second = x.new_empty(12 * 2**20)\n        return self.scale(x)\n"
    )
    words = ["max-batch", "--model", f"{file}:Wide", "--input", "1", "--loss", "sum", "--steps", "1"]
    words += ["--allocator-cap-mib", str(mib), "--no-cache"]
    assert (run(words), run([*words, "--no-retries"])) == (plain, strict)


@pytest.mark.slow
def test_the_table_of_gpus_leads_with_full_speed() -> None:
    """Each row has both answers of `max-batch`."""
    table = gpus("torchvision:resnet18", filter=["L4"])
    rows = {row["gpu"]: row for row in table.to_dict()["rows"]}
    assert (rows["L4 24GB"]["comfortable_batch"], rows["L4 24GB"]["max_batch"]) == both_batches()
    line = next(line for line in str(table).splitlines() if line.startswith("L4 24GB "))
    assert tuple(line.replace(",", "").split()[2:4]) == tuple(map(str, both_batches()))
    for name in ("T4", "A10G", "H100 80GB"):
        alone = max_batch("torchvision:resnet18", gpu=name)
        (fit,) = gpus("torchvision:resnet18", devices=[find_device(name)]).fits
        assert (fit.comfortable_batch, fit.max_batch) == (alone.comfortable_batch, alone.max_batch)


@pytest.mark.slow
def test_advice_names_retries() -> None:
    """A batch that fits by retries alone is not reported to fit as it is without a mention of them."""
    text = str(advise("torchvision:resnet18", 800, gpu="L4"))
    assert text.startswith("Batch 800 fits at confidence 0.99 as it is, though with allocator retries")


def test_the_formula_refuses_no_retries() -> None:
    """The formula knows no allocator."""
    with pytest.raises(UsageError, match="--no-retries: the formula knows no allocator"):
        max_batch("resnet50", gpu="L4", method="formula", no_retries=True)


def test_what_retries_cost_by_hand() -> None:
    """30 of 110 MiB stay in use; 40 are given back for 50, and in the second step these for 55."""
    limits = MemoryLimits(110 * MIB)
    assert count_retries(GROWING, limits) == (RetryCost(1, 1, 3), RetryCost(1, 1, 1))
    assert replay_trace(GROWING, limits).retries == 2


def test_the_costs_are_listed_by_step() -> None:
    """The first few steps, whatever their number, and all calls together."""
    texts = [retries_text([RetryCost(n, 2 * n, n) for n in range(1, end)]) for end in (2, 3, 4, 9)]
    assert [text.partition(";")[0] for text in texts] == [
        "1 in the step traced",
        "1 and 2 in the 2 steps traced",
        "1, 2 and 3 in the 3 steps traced",
        "1, 2, 3, 4, 5 and ... in the 8 steps traced",
    ]
    assert [int(text.split("in all: ")[1].split(";")[0]) for text in texts] == [2, 6, 12, 72]
    assert all(len(one) <= len(other) for one, other in pairwise(texts))
