"""The fewest GPUs of a global batch, held against plans of the same rank one by one."""

from typing import Any

import pytest

import planner
from planner.api.budget import make_budget
from planner.errors import UsageError
from planner.jobs import Checkpoint, Job
from planner.planning import ClusterQuestion, ClusterSearch, find_clusters
from planner.planning.clusters.splits import Recipe, splits_on
from planner.program import Alloc, Category, Phase, PhaseStart, Site, Target, Trace

GIB = 2**30

LLAMA: dict[str, Any] = {
    "model": "hf:llama",
    "model_arg": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 8, "num_hidden_layers": 10,
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


def test_half_of_the_fewest_gpus_are_too_few(answer: planner.ClusterResult) -> None:
    fewest = answer.to_dict()["rows"][0]["plans"][0]
    assert fewest["gpus"] > 1
    assert rank({"checkpoint": "blocks", "micro_batch": 1}, fewest["gpus"] // 2)["fits"] != "yes"


def test_report_names_the_cluster(answer: planner.ClusterResult) -> None:
    assert f"GPUs needed:    4 {CARD}, for global batch 8 at confidence 0.99" in str(answer)
    assert "2 GPUs in a node" in str(answer)


class Layers:
    """Traces of ranks that hold equal parts of a model, and of activations a part for each of `tp`."""

    def trace(self, job: Job, batch: int, target: Target) -> Trace:
        model, activations = 40 * GIB // max(job.fsdp, 1), 20 * GIB * batch
        size = (model + activations) // max(job.tp, 1)
        events = (PhaseStart(0, Phase.SETUP), Alloc(1, size, Category.PARAMETER, 0))
        return Trace(events, (Site("", "aten.empty"),), batch)


def test_tensor_parallel_is_tried_on_fewer_gpus() -> None:
    budget = make_budget({"gpu": "A100 40GB"})
    search = ClusterSearch(Job("made up"), ClusterQuestion(8), Layers())  # type: ignore[arg-type]
    (plans,) = find_clusters(search, [lambda job: budget], lambda text: None)
    first, *others = [(plan.split.gpus, plan.split.recipe.tp) for plan in plans.plans]
    assert first == (2, 2)  # 30 GiB of each; FSDP alone takes 40 GiB on 2 and 30 on 4
    assert others == [(4, 1), (8, 1)]


def test_numbers_of_gpus_divide_batch_and_nodes() -> None:
    assert ClusterQuestion(48).gpu_counts() == [1, 2, 4, 8, 16, 24, 48]
    assert ClusterQuestion(48, most_gpus=20).gpu_counts() == [1, 2, 4, 8, 16]
    assert ClusterQuestion(6, gpus_per_node=4).gpu_counts(2) == [2, 4, 12]
    splits = list(splits_on(16, Recipe(Checkpoint.NONE, True, tp=4), ClusterQuestion(24)))
    assert [(split.micro_batch, split.accumulate) for split in splits] == [(1, 6), (2, 3), (3, 2), (6, 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp": 4}, "--fsdp and --global-batch"),
        ({"filter": "1g.5gb"}, "only slices of GPUs are left"),
        ({"seq": 8, "input": "8:int64"}, "--seq and --input"),
        ({"mode": "infer"}, "--mode infer"),
        ({"global_batch": None, "cluster": "c.yaml"}, "--cluster: give the batch"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planner.clusters(**{"global_batch": 32, **LLAMA, **options})
