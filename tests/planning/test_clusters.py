"""The fewest GPUs of a global batch, held against plans of the same rank one by one."""

from pathlib import Path
from typing import Any

import pytest

import planner
from planner.api.request.budget import find_budget
from planner.errors import UsageError
from planner.jobs import Checkpoint, Job, Loss, Mode
from planner.planning import ClusterQuestion, ClusterSearch, find_clusters
from planner.planning.clusters.splits import Gathers, SplitRecipe, splits_on
from planner.program import Alloc, Category, Free, Phase, PhaseStart, Site, Target, Trace
from tests.helpers.models import job_of

GIB = 2**30

LLAMA: dict[str, Any] = {
    "model": "hf:llama",
    "model_arg": {
        "hidden_size": 1536, "intermediate_size": 6144, "num_attention_heads": 8, "num_hidden_layers": 18,
        "vocab_size": 8000,
    },
    "optimizer": "adamw",
    "fsdp_arg": ["param_dtype=bf16", "reduce_dtype=fp32", "reshard_after_forward=true"],
}  # fmt: skip
CARD = "RTX 3060 Ti 8GB"


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> planner.ClusterResult:
    file = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    file.write_text(f"gpu: {CARD}\nnodes: 4\ngpus_per_node: 2\n")
    return planner.clusters(global_batch=8, seq=512, cluster=file, **LLAMA)


def rank(plan: dict[str, Any], gpus: int) -> dict[str, Any]:
    """Return the estimate of one rank of a plan on so many GPUs."""
    options = {**LLAMA, "input": "512:int64", "gpu": CARD, "checkpoint": plan["checkpoint"]}
    options["accumulate"] = min(2, 8 // gpus // plan["micro_batch"])
    options |= {"fsdp": gpus} if gpus > 1 else {"fsdp_arg": None}
    return planner.estimate(options.pop("model"), plan["micro_batch"], **options).to_dict()


@pytest.mark.slow
def test_plans_are_those_of_their_ranks(answer: planner.ClusterResult) -> None:
    document = answer.to_dict()
    (row,) = document["rows"]
    assert document["repeated_blocks"] and row["gpu"] == CARD and len(row["plans"]) > 1
    for plan in row["plans"]:
        estimate = rank(plan, plan["gpus"])
        for figure in ("peak_allocated_mib", "peak_reserved_mib", "process_mib", "process_upper_mib"):
            assert plan[figure] == estimate[figure]
        assert estimate["fits"] == "yes"
        assert plan["micro_batch"] * plan["accumulate"] * plan["gpus"] == 8


@pytest.mark.slow
def test_half_of_the_fewest_gpus_are_too_few(answer: planner.ClusterResult) -> None:
    fewest = answer.to_dict()["rows"][0]["plans"][0]
    assert fewest["gpus"] > 1
    assert rank({"checkpoint": "blocks", "micro_batch": 1}, fewest["gpus"] // 2)["fits"] != "yes"


@pytest.mark.slow
def test_advice_is_on_all_gpus_of_the_cluster(tmp_path: Path) -> None:
    """Each split is the plan of its rank, and all recipes are told of."""
    file = tmp_path / "cluster.yaml"
    file.write_text(f"gpu: {CARD}\nnodes: 1\ngpus_per_node: 2\n")
    options = {**LLAMA, "model_arg": {**LLAMA["model_arg"], "num_hidden_layers": 2}}
    result = planner.advise_cluster(global_batch=4, seq=512, cluster=file, **options)
    document = result.to_dict()
    (row,) = document["rows"]
    alone = [plan for plan in row["plans"] if not plan["tp"]]
    assert [plan["checkpoint"] for plan in alone] == ["none", "blocks"]
    for plan in alone:
        estimate = planner.estimate(
            batch=plan["micro_batch"], **options, input="512:int64", gpu=CARD, checkpoint=plan["checkpoint"],
            fsdp=2, accumulate=plan["accumulate"],
        ).to_dict()  # fmt: skip
        assert plan["peak_reserved_mib"] == estimate["peak_reserved_mib"]
    assert len(row["plans"]) + len(document["failed"]) == 4  # with tensor parallel too
    assert f"{len(row['plans'])} of 4 fit 2 {CARD}, for global batch 4" in str(result)


@pytest.mark.slow
def test_small_models_are_replicated(tmp_path: Path) -> None:
    """Where the whole model fits each GPU, DDP comes first, as the rank's own plan has it."""
    file = tmp_path / "cluster.yaml"
    file.write_text("gpu: T4\nnodes: 1\ngpus_per_node: 4\n")
    result = planner.advise_cluster("torchvision:alexnet", 64, cluster=file)
    first = result.to_dict()["rows"][0]["plans"][0]
    assert (first["ddp"], first["micro_batch"], first["accumulate"]) == (True, 16, 1)
    estimate = planner.estimate("torchvision:alexnet", 16, gpu="T4", ddp=True).to_dict()
    assert first["process_mib"] == estimate["process_mib"]


@pytest.mark.slow
def test_report_names_the_cluster(answer: planner.ClusterResult) -> None:
    assert f"GPUs needed:    4 {CARD}, for global batch 8 at confidence 0.99" in str(answer)
    assert "2 GPUs in a node" in str(answer)


class Layers:
    """Traces of ranks that hold equal parts of a model, and of activations a part for each of `tp`."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int, int]] = []

    def trace(self, job: Job, batch: int, target: Target) -> Trace:
        self.taken.append((job.sharding.fsdp, job.sharding.tp, batch))
        tp = max(job.sharding.tp, 1)
        model = 40 * GIB // max(job.sharding.fsdp, 1) // tp
        activations = (20 if job.loop.checkpoint is Checkpoint.NONE else 5) * GIB * batch // tp
        events = (
            PhaseStart(0, Phase.SETUP),
            Alloc(1, model, Category.PARAMETER, 0),
            PhaseStart(0, Phase.FORWARD),
            Alloc(2, activations, Category.ACTIVATION, 0),
            Free(2),
        )
        return Trace(events, (Site("", "aten.empty"),), batch)


def search_of(global_batch: int, most_gpus: int = 64) -> tuple[ClusterSearch, Layers]:
    layers = Layers()
    question = ClusterQuestion(global_batch, most_gpus=most_gpus)
    return ClusterSearch(job_of("8", mode=Mode.TRAIN, loss=Loss.SUM), question, layers), layers  # type: ignore[arg-type]


def test_tensor_parallel_is_tried_on_fewer_gpus() -> None:
    """5 GiB of activations and all 40 GiB of weights are too many for 1 GPU, and a half of both is not."""
    budget = find_budget({"gpu": "A100 40GB"})
    search, _ = search_of(8, 8)
    (plans,) = find_clusters(search, [lambda job: budget])
    found = [(plan.split.gpus, plan.split.recipe.checkpoint.value) for plan in plans.plans]
    assert found == [(2, "blocks"), (4, "none"), (8, "none")]


def test_what_is_not_planned_together_is_named() -> None:
    """Tensor parallel with frozen parameters is refused where a job is made, and named by the search."""
    job = job_of("8", mode=Mode.TRAIN, loss=Loss.SUM).replace(freeze=("a.*",))
    search = ClusterSearch(job, ClusterQuestion(8, most_gpus=8), Layers())  # type: ignore[arg-type]
    advice = search.advise(lambda job: find_budget({"gpu": "A100 40GB"}))
    assert {plan.split.recipe.tp for plan in advice.plans.plans} == {1}
    assert {recipe.tp for recipe in advice.failed} <= {1}
    assert any("tensor parallel over 2 GPUs is not planned" in note for note in advice.plans.notes)


@pytest.mark.parametrize("global_batch", [1, 8, 24, 64])
@pytest.mark.parametrize("gpu", ["A100 40GB", "RTX 3090", "RTX 3060"])
def test_splits_that_are_ruled_out_do_not_fit(
    global_batch: int, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that traces every split in its way finds the same plans, and traces more."""
    budget = find_budget({"gpu": gpu})

    def answers() -> tuple[object, object, int]:
        search, layers = search_of(global_batch)
        plans, advice = search.plans(lambda job: budget, 4), search.advise(lambda job: budget)
        return plans, advice, len(layers.taken)

    *found, taken = answers()
    monkeypatch.setattr("planner.planning.clusters.search.least_bytes", lambda split, traced: 0)
    *expected, most = answers()
    assert found == expected
    assert taken < most or most <= 8


def test_numbers_of_gpus_divide_batch_and_nodes() -> None:
    assert ClusterQuestion(48).gpu_counts() == [1, 2, 4, 8, 16, 24, 48]
    assert ClusterQuestion(48, most_gpus=20).gpu_counts() == [1, 2, 4, 8, 16]
    assert ClusterQuestion(6, gpus_per_node=4).gpu_counts(2) == [2, 4, 12]
    splits = list(splits_on(16, SplitRecipe(Checkpoint.NONE, Gathers.TWICE, tp=4), ClusterQuestion(24)))
    assert [(split.micro_batch, split.accumulate) for split in splits] == [(1, 6), (2, 3), (3, 2), (6, 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp": 4}, "--fsdp and --global-batch"),
        ({"filter": "1g.5gb"}, "only slices of GPUs are left"),
        ({"seq": 8, "input": "8:int64"}, "--seq and --input"),
        ({"mode": "infer"}, "--mode infer"),
        ({"global_batch": None, "cluster": "c.yaml"}, "--global-batch: give the batch"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planner.clusters(**{"global_batch": 32, **LLAMA, **options})
