"""The report of `planner gpus --global-batch`, and of the splits that fit a given cluster."""

from collections.abc import Iterable
from typing import Any

from planner.jobs import Checkpoint
from planner.planning import ClusterAdvice, ClusterPlan, ClusterPlans, ClusterTable, Gathers, SplitRecipe
from planner.report.budget import planned_job
from planner.report.commands.estimates.estimate import plan_seconds_to_json
from planner.report.commands.estimates.tables import closing_section
from planner.report.describe import job_entry
from planner.report.document import Block, Bullets, Cell, Column, Document, Entry, Headline, Paragraph, Table
from planner.report.units import mib

_COLUMNS = (
    Column("GPU"),
    Column("GPUs", is_number=True),
    Column("nodes", is_number=True, rank=4),
    Column("split", rank=0),
    Column("batch of each", rank=1),
    Column("recomputes", rank=2),
    Column("gathers", rank=3),
    Column("process", is_number=True),
    Column("at most", is_number=True, rank=5),
    Column("left free", is_number=True),
)


def clusters_document(table: ClusterTable) -> Document:
    """Return the report of `planner gpus --global-batch`, or of `table.advice` on a given cluster.

    The report lists the fewest GPUs of each kind, several splits if there is one kind of GPU, or all splits
    that fit the GPUs of a given cluster.
    """
    if table.advice is not None:
        return _advice_document(table, table.advice)
    rows = [cells for row in table.rows for cells in _rows(table, row)]
    fewest = [row.plans[0] for row in table.rows if row.plans]
    return Document.of(
        [Headline((_answer(table), job_entry(table.job)), "good" if fewest else "bad")],
        [Table(_COLUMNS, rows, indent=0)],
        [*_legend(table), *closing_section(None, table.seconds, table.import_seconds)],
    )


def _advice_document(table: ClusterTable, advice: ClusterAdvice) -> Document:
    plans = advice.plans.plans
    tried = len(plans) + len(advice.failed)
    at = f"global batch {table.question.global_batch:,} at confidence {table.confidence:g}"
    gpus = f"{advice.gpus:,} {advice.plans.budget.device.name}"
    answer = Entry("Splits", f"{len(plans)} of {tried} fit {gpus}, for {at}")
    failed = [f"does not fit: {_in_words(recipe)}" for recipe in advice.failed]
    more = "say how many GPUs it takes: planner gpus --global-batch, without --cluster"
    return Document.of(
        [Headline((answer, job_entry(table.job)), "good" if plans else "bad")],
        [Table(_COLUMNS, [_cells(table, plan) for plan in plans], indent=0)] if plans else [Paragraph(more)],
        [Bullets("", failed)] if failed else [],
        [*_legend(table), *closing_section(None, table.seconds, table.import_seconds)],
    )


def _in_words(recipe: SplitRecipe) -> str:
    spread = {
        Gathers.NEVER: "DDP", Gathers.ONCE: "FSDP gathering once", Gathers.TWICE: "FSDP gathering twice"
    }[recipe.gathers]  # fmt: skip
    tp = f" with tp {recipe.tp}" if recipe.tp > 1 else ""
    return f"{spread}{tp}{'' if recipe.checkpoint is Checkpoint.NONE else ', recomputing blocks'}"


def _answer(table: ClusterTable) -> Entry:
    question, fewest = table.question, [row.plans[0] for row in table.rows if row.plans]
    asked = f"global batch {question.global_batch:,} at confidence {table.confidence:g}"
    if not fewest:
        return Entry("GPUs needed", f"more than {question.most_tried():,}, for {asked}")
    least = min(fewest, key=lambda plan: plan.split.gpus)
    name = "" if len(table.rows) == 1 else "at the least "
    return Entry("GPUs needed", f"{name}{least.split.gpus:,} {least.budget.device.name}, for {asked}")


def _rows(table: ClusterTable, row: ClusterPlans) -> Iterable[tuple[Cell | str, ...]]:
    if not row.plans:
        most = table.question.most_tried()
        return [(row.budget.device.name, Cell(f">{most:,}", "bad"), *("-",) * (len(_COLUMNS) - 2))]
    return [_cells(table, plan) for plan in row.plans]


def _cells(table: ClusterTable, plan: ClusterPlan) -> tuple[Cell | str, ...]:
    split = plan.split
    times = f"{split.micro_batch} x {split.accumulate}" if split.accumulate > 1 else f"{split.micro_batch}"
    sizes = (plan.process_bytes, plan.process_upper_bytes, plan.free_bytes)
    return (
        plan.budget.device.name,
        f"{split.gpus:,}",
        f"{-(-split.gpus // table.question.gpus_per_node):,}",
        _split(plan),
        times,
        _recomputes(plan),
        _gathers(plan),
        *(f"{round(mib(size)):,}" for size in sizes),
    )


def _split(plan: ClusterPlan) -> str:
    """Return a text with the numbers of ranks for DDP, FSDP and tensor parallelism."""
    parts = (
        ("ddp", plan.split.gpus * plan.job.sharding.ddp),
        ("fsdp", plan.job.sharding.fsdp),
        ("tp", plan.job.sharding.tp),
    )
    return " x ".join(f"{name} {ranks}" for name, ranks in parts if ranks) or "-"


def _recomputes(plan: ClusterPlan) -> str:
    return "nothing" if plan.split.recipe.checkpoint is Checkpoint.NONE else "blocks"


def _gathers(plan: ClusterPlan) -> str:
    return plan.split.recipe.gathers.name.lower() if plan.job.sharding.fsdp else "never"


def _legend(table: ClusterTable) -> list[Block]:
    texts = [
        "split: GPUs that each hold the whole model (DDP) or over which FSDP shards it, and the size of "
        "groups that share each layer (tensor parallel); "
        "batch of each GPU or group: micro-batch x micro-batches of a step; recomputes: what runs again in "
        "the backward pass; gathers: weights of a block once, kept for its backward pass, or twice, for each "
        "pass again",
        "process, at most, left free: MiB of the rank that takes most, as nvidia-smi shows it, at the "
        "confidence, and what it leaves of the memory that torch sees; plans run without retries",
    ]
    assumed = [
        "DDP, or FSDP2 block by block; tensor parallel within a node"
        + ("" if table.advice else ", tried on fewer GPUs than do without it"),
        "throughput is not estimated: fewer GPUs take longer",
        f"{table.question.gpus_per_node} GPUs in a node; numbers of GPUs that divide the global batch were "
        "tried",
    ]
    notes = dict.fromkeys(note for row in _kinds(table) for note in row.notes)
    return [*(Paragraph(text) for text in texts), Bullets("", [*assumed, *notes])]


def clusters_to_json(table: ClusterTable) -> dict[str, Any]:
    """Return the JSON object of `planner gpus --global-batch`. MiB are rounded to 0.001."""
    return {
        **planned_job(table.job),
        "global_batch": table.question.global_batch,
        "gpus_per_node": table.question.gpus_per_node,
        "most_gpus": table.question.most_gpus,
        "confidence": table.confidence,
        "rows": [
            {"gpu": row.budget.device.name, "plans": [_plan_to_json(table, plan) for plan in row.plans]}
            for row in _kinds(table)
        ],
        "failed": [_recipe_to_json(recipe) for recipe in (table.advice.failed if table.advice else ())],
        "assumptions": list(dict.fromkeys(note for row in _kinds(table) for note in row.notes)),
        "repeated_blocks": table.is_repeated,
        "seconds": plan_seconds_to_json(table.seconds, table.import_seconds),
    }


def _kinds(table: ClusterTable) -> tuple[ClusterPlans, ...]:
    return table.rows if table.advice is None else (table.advice.plans,)


def _recipe_to_json(recipe: SplitRecipe) -> dict[str, Any]:
    return {
        "ddp": recipe.gathers is Gathers.NEVER,
        "tp": recipe.tp if recipe.tp > 1 else 0,
        "reshard_after_forward": recipe.gathers is Gathers.TWICE,
        "checkpoint": recipe.checkpoint.value,
    }


def _plan_to_json(table: ClusterTable, plan: ClusterPlan) -> dict[str, Any]:
    split = plan.split
    return {
        "gpus": split.gpus,
        "nodes": -(-split.gpus // table.question.gpus_per_node),
        "fsdp": plan.job.sharding.fsdp,
        **_recipe_to_json(split.recipe),
        "ddp": plan.job.sharding.ddp,
        "tp": plan.job.sharding.tp,
        "micro_batch": split.micro_batch,
        "accumulate": split.accumulate,
        "peak_allocated_mib": mib(plan.peak_allocated_bytes),
        "peak_reserved_mib": mib(plan.peak_reserved_bytes),
        "process_mib": mib(plan.process_bytes),
        "process_upper_mib": mib(plan.process_upper_bytes),
        "free_mib": mib(plan.free_bytes),
    }
