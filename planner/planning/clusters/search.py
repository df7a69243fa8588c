"""The fewest GPUs of a kind on which a global batch runs, and the splits on them and on more."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from planner.allocator import replay_trace
from planner.errors import PlannerError
from planner.hardware import (
    Budget,
    Likeness,
    judge_budget,
    process_bytes,
    upper_process_bytes,
    with_likeness,
)
from planner.jobs import Job
from planner.planning.clusters.rank_traces import RankTraces
from planner.planning.clusters.splits import ClusterQuestion, Recipe, Split, job_of, recipes_of, splits_on
from planner.planning.estimate import Seconds, unlimited

MOST_PLANS = 4  # of one kind of GPU: on the fewest, on more, and without what costs time


class ClusterPlan(Struct, frozen=True):
    """A split that fits, without retries, with what its fullest rank takes."""

    budget: Budget
    split: Split
    job: Job  # of one rank
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    process_upper_bytes: int  # at the confidence
    notes: tuple[str, ...]  # of the trace

    @property
    def free_bytes(self) -> int:
        """Return what the process leaves of the GPU's memory."""
        return self.budget.device.usable.value - self.process_bytes


class ClusterPlans(Struct, frozen=True):
    """The plans of one kind of GPU; none where even the most GPUs are too few."""

    budget: Budget
    plans: tuple[ClusterPlan, ...]  # by rising number of GPUs
    notes: tuple[str, ...] = ()  # of the traces


class ClusterTable(Struct, frozen=True):
    """The answer to a question for some kinds of GPUs."""

    job: Job
    question: ClusterQuestion
    confidence: float
    rows: tuple[ClusterPlans, ...]
    is_repeated: bool  # deep traces follow from shallow ones
    import_seconds: float
    seconds: Seconds


class _Need(Struct, frozen=True):
    """The peaks of a rank's allocator where it has no limit, and the published runs that the job is like."""

    allocated_bytes: int
    reserved_bytes: int
    likeness: Likeness
    notes: tuple[str, ...]


BudgetOf = Callable[[Job], Budget]  # of one kind of GPU, with room for NCCL in this job


class ClusterSearch:
    """The splits of one job on kinds of GPUs, from traces that they share."""

    def __init__(self, job: Job, question: ClusterQuestion, traces: RankTraces) -> None:
        self._job, self._question, self._traces = job, question, traces
        self._recipes = recipes_of(job)
        self._needs: dict[tuple[object, ...], _Need] = {}
        self._refused: dict[str, str] = {}  # reasons, by what is not planned

    def plans(self, budget_of: BudgetOf, most: int = 1) -> ClusterPlans:
        """Return the plan on the fewest GPUs; with `most` above 1 also on more, and by faster recipes.

        Tensor parallel is tried on fewer GPUs than do without it, by the recipe of least memory. Raises the
        errors of a capture.
        """
        possible = self._possible(self._recipes, budget_of)
        for tp in self._question.tensor_parallel_sizes():
            shared = replace(self._recipes[-1], tp=tp)
            possible |= self._possible([shared], budget_of, min(possible.values(), default=None))
            if _refusable(shared, self._job) in self._refused:
                break  # and in larger groups
        if not possible:
            return ClusterPlans(budget_of(self._job), (), tuple(self._refused.values()))
        counts = sorted({count for recipe in possible for count in self._question.gpu_counts(recipe.tp)})
        at = counts.index(min(possible.values()))
        wanted = {*counts[at : at + most - 1], counts[at]}
        if most > 1:
            wanted.add(possible[next(iter(possible))])
        plans = [self._least_costly(gpus, possible, budget_of) for gpus in sorted(wanted)]
        shown = tuple(plan for plan in plans if plan is not None)
        first = shown[0]
        return ClusterPlans(first.budget, shown, (*first.notes, *self._refused.values()))

    def _possible(
        self, recipes: Sequence[Recipe], budget_of: BudgetOf, below: int | None = None
    ) -> dict[Recipe, int]:
        """Return the recipes that run on any number of GPUs, or any below one, each with the smallest."""
        found = {}
        for recipe in recipes:
            counts = self._question.gpu_counts(recipe.tp)
            counts = counts if below is None else counts[: bisect_left(counts, below)]
            if counts and self._runs(counts[-1], recipe, budget_of):
                fewest = bisect_left(
                    counts[:-1], True, key=partial(self._runs, recipe=recipe, budget_of=budget_of)
                )
                found[recipe] = counts[fewest]
        return found

    def _runs(self, gpus: int, recipe: Recipe, budget_of: BudgetOf) -> bool:
        return self._fits(next(splits_on(gpus, recipe, self._question)), budget_of) is not None

    def _least_costly(
        self, gpus: int, possible: Mapping[Recipe, int], budget_of: BudgetOf
    ) -> ClusterPlan | None:
        """Return the plan of the fastest recipe that fits, with its largest micro-batch."""
        for recipe, fewest in possible.items():
            if gpus < fewest or gpus not in self._question.gpu_counts(recipe.tp):
                continue
            best = None
            for split in splits_on(gpus, recipe, self._question):
                larger = self._fits(split, budget_of)
                if larger is None:
                    break
                best = larger
            if best is not None:
                return best
        return None

    def _fits(self, split: Split, budget_of: BudgetOf) -> ClusterPlan | None:
        """Return the plan of a split; None where it needs retries or more memory than there is."""
        what = _refusable(split.recipe, self._job)
        if what in self._refused:
            return None
        job = job_of(self._job, split)
        budget = budget_of(job)
        try:
            need = self._need(job, split.micro_batch, budget)
        except PlannerError as error:
            if not what:
                raise
            self._refused[what] = f"{what} is not planned: {error}"
            return None
        budget = with_likeness(budget, need.likeness)
        limit = budget.limits.allocator_limit_bytes
        if limit is not None and need.reserved_bytes > limit:
            return None
        return ClusterPlan(
            budget, split, job, need.allocated_bytes, need.reserved_bytes,
            process_bytes(budget, need.reserved_bytes), upper_process_bytes(budget, need.reserved_bytes),
            need.notes,
        )  # fmt: skip

    def _need(self, job: Job, batch: int, budget: Budget) -> _Need:
        """Return what a rank needs. Its trace, which may have a million events, is not held."""
        limits = unlimited(budget.limits)
        key = job, batch, budget.device.target, limits.config
        if key not in self._needs:
            trace = self._traces.trace(job, batch, budget.device.target)
            replay = replay_trace(trace, limits)
            likeness = judge_budget(budget, job, trace).likeness
            self._needs[key] = _Need(
                replay.peak_allocated_bytes, replay.peak_reserved_bytes, likeness, trace.notes
            )
        return self._needs[key]


def _refusable(recipe: Recipe, job: Job) -> str:
    """Return what a model may not be made for; "" for what the job itself wants."""
    if recipe.tp > 1:
        return f"tensor parallel over {recipe.tp} GPUs"
    return "" if recipe.checkpoint is job.checkpoint else "recomputation"


def find_clusters(
    search: ClusterSearch, budgets: Sequence[BudgetOf], on_progress: Callable[[str], None]
) -> tuple[ClusterPlans, ...]:
    """Return the plans of each kind of GPU: the fewest of each, or several splits of one kind."""
    most = MOST_PLANS if len(budgets) == 1 else 1
    return tuple(search.plans(budget_of, most) for budget_of in budgets)
