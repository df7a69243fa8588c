"""Find the fewest GPUs that run a global batch, and the splits of the batch over these or more GPUs."""

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
from planner.jobs import Job, complete_job
from planner.planning.clusters.lower_bound import TracedSplit, least_bytes, state_bytes_of
from planner.planning.clusters.rank_traces import RankTraces
from planner.planning.clusters.splits import (
    ClusterQuestion,
    Gathers,
    Split,
    SplitRecipe,
    job_of,
    recipes_of,
    splits_on,
)
from planner.planning.estimate import Seconds, unlimited

MOST_PLANS = 4  # plans of one kind of GPU: on the fewest GPUs, on more, and by the fastest recipe


class ClusterPlan(Struct, frozen=True):
    """A split, with the memory that its fullest rank takes."""

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
        """Return the GPU's usable bytes minus the bytes of the process."""
        return self.budget.device.usable.value - self.process_bytes

    @property
    def fits(self) -> bool:
        """Return whether the reserved peak is within the allocator's limit, so that no retries are needed."""
        limit = self.budget.limits.allocator_limit_bytes
        return limit is None or self.peak_reserved_bytes <= limit


class ClusterPlans(Struct, frozen=True):
    """The splits planned for one kind of GPU, or none if no number of GPUs suffices."""

    budget: Budget
    plans: tuple[ClusterPlan, ...]  # in ascending order of the number of GPUs
    notes: tuple[str, ...] = ()  # of the traces


class ClusterAdvice(Struct, frozen=True):
    """The plan of the largest micro-batch for each recipe that fits on a cluster, and the other recipes."""

    gpus: int
    plans: ClusterPlans  # the fastest recipe first; recipes without tensor parallel before recipes with it
    failed: tuple[SplitRecipe, ...]  # recipes that do not fit


class ClusterTable(Struct, frozen=True):
    """The plans of a job's global batch for each kind of GPU, with the durations of the search."""

    job: Job
    question: ClusterQuestion
    confidence: float
    rows: tuple[ClusterPlans, ...]
    advice: ClusterAdvice | None  # None unless plans for all GPUs of a cluster are asked for
    is_repeated: bool  # whether all traces were extrapolated from shallow models
    import_seconds: float
    seconds: Seconds


class _Need(Struct, frozen=True):
    """The peaks and state bytes of a rank in unlimited memory, and its likeness to published runs."""

    allocated_bytes: int
    reserved_bytes: int
    state_bytes: int
    likeness: Likeness
    notes: tuple[str, ...]


BudgetOf = Callable[[Job], Budget]  # the budget of one kind of GPU, minus NCCL's memory in the job


class ClusterSearch:
    """A search for the splits of one job over several kinds of GPUs. The kinds of GPUs share traces."""

    def __init__(self, job: Job, question: ClusterQuestion, traces: RankTraces) -> None:
        self._job, self._question, self._traces = job, question, traces
        self._recipes = recipes_of(job)
        self._needs: dict[tuple[object, ...], _Need] = {}
        self._traced: dict[tuple[object, ...], list[TracedSplit]] = {}  # by GPU
        self._refused: dict[str, str] = {}  # reasons, by the measure that is not planned

    def plans(self, budget_of: BudgetOf, most: int = 1) -> ClusterPlans:
        """Return up to `most` plans for one kind of GPU, the plan on the fewest GPUs first.

        If `most` is above 1, plans on more GPUs are added, including the fewest GPUs on which the fastest
        recipe fits. Tensor parallel is tried only on fewer GPUs than suffice without it, with the recipe of
        least memory. Raises the errors of a capture.
        """
        possible = self._possible(self._recipes, budget_of)
        for tp in self._question.tensor_parallel_sizes():
            shared = replace(self._recipes[-1], tp=tp)
            possible |= self._possible([shared], budget_of, min(possible.values(), default=None))
            if _refusable(shared, self._job) in self._refused:
                break  # larger groups are refused too
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

    def advise(self, budget_of: BudgetOf) -> ClusterAdvice:
        """Return a plan on the most possible GPUs for each recipe that fits, and the recipes that do not fit.

        Raises the errors of a capture.
        """
        question = self._question
        sizes = (1, *question.tensor_parallel_sizes())
        gpus = max(question.gpu_counts(tp)[-1] for tp in sizes)
        recipes = [
            replace(recipe, tp=tp)
            for tp in sizes
            for recipe in self._recipes
            if gpus in question.gpu_counts(tp) and (tp == 1 or recipe.gathers is not Gathers.NEVER)
        ]
        best = {recipe: self._largest(gpus, recipe, budget_of) for recipe in reversed(recipes)}
        plans = tuple(plan for recipe in recipes if (plan := best[recipe]) is not None)
        failed = tuple(
            recipe
            for recipe in recipes
            if best[recipe] is None and _refusable(recipe, self._job) not in self._refused
        )
        notes = (*(plans[0].notes if plans else ()), *self._refused.values())
        budget = plans[0].budget if plans else budget_of(self._job)
        return ClusterAdvice(gpus, ClusterPlans(budget, plans, notes), failed)

    def _possible(
        self, recipes: Sequence[SplitRecipe], budget_of: BudgetOf, below: int | None = None
    ) -> dict[SplitRecipe, int]:
        """Return the smallest number of GPUs on which each recipe fits, without recipes that never fit.

        Only numbers of GPUs below `below` are tried, if it is given. The recipes that save most memory are
        tried first, since their traces may rule out the others.
        """
        found = {}
        for recipe in reversed(recipes):
            counts = self._question.gpu_counts(recipe.tp)
            counts = counts if below is None else counts[: bisect_left(counts, below)]
            if counts and self._fits(counts[-1], recipe, budget_of):
                fewest = bisect_left(
                    counts[:-1], True, key=partial(self._fits, recipe=recipe, budget_of=budget_of)
                )
                found[recipe] = counts[fewest]
        return {recipe: found[recipe] for recipe in recipes if recipe in found}

    def _fits(self, gpus: int, recipe: SplitRecipe, budget_of: BudgetOf) -> bool:
        return self._fitting(next(splits_on(gpus, recipe, self._question)), budget_of) is not None

    def _least_costly(
        self, gpus: int, possible: Mapping[SplitRecipe, int], budget_of: BudgetOf
    ) -> ClusterPlan | None:
        """Return the plan with the fastest fitting recipe's largest micro-batch on `gpus` GPUs, or None."""
        for recipe, fewest in possible.items():
            if gpus < fewest or gpus not in self._question.gpu_counts(recipe.tp):
                continue
            best = self._largest(gpus, recipe, budget_of)
            if best is not None:
                return best
        return None

    def _largest(self, gpus: int, recipe: SplitRecipe, budget_of: BudgetOf) -> ClusterPlan | None:
        """Return a recipe's plan with the largest micro-batch that fits on `gpus` GPUs, or None."""
        best = None
        for split in splits_on(gpus, recipe, self._question):
            larger = self._fitting(split, budget_of)
            if larger is None:
                break
            best = larger
        return best

    def _fitting(self, split: Split, budget_of: BudgetOf) -> ClusterPlan | None:
        """Return the plan of a split, or None if it needs retries, does not fit or is refused."""
        what = _refusable(split.recipe, self._job)
        if what in self._refused:
            return None
        plan = self._planned(split, budget_of)
        return plan if plan is not None and plan.fits else None

    def _planned(self, split: Split, budget_of: BudgetOf) -> ClusterPlan | None:
        """Return the plan of a split, or None if the job is refused or a lower bound exceeds the limit.

        Raises the job's error if the recipe has no technique that a model may not support.
        """
        job = job_of(self._job, split)
        budget = budget_of(job)
        if self._cannot_fit(split, budget):
            return None
        what = _refusable(split.recipe, self._job)
        try:
            need = self._need(complete_job(job), split, budget)  # refuses options that several ranks exclude
        except PlannerError as error:
            if not what:
                raise
            self._refused[what] = f"{what} is not planned: {error}"
            return None
        budget = with_likeness(budget, need.likeness)
        return ClusterPlan(
            budget, split, job, need.allocated_bytes, need.reserved_bytes,
            process_bytes(budget, need.reserved_bytes), upper_process_bytes(budget, need.reserved_bytes),
            need.notes,
        )  # fmt: skip

    def _cannot_fit(self, split: Split, budget: Budget) -> bool:
        """Return whether a lower bound from the traced splits shows that a split exceeds the memory limit.

        The split has to exceed the limit with the margins of each likeness that was found for a traced split.
        """
        likenesses = {need.likeness for need in self._needs.values()}
        limits = [with_likeness(budget, one).limits.allocator_limit_bytes for one in likenesses]
        least = least_bytes(split, self._traced.get(_kind_of_trace(budget), []))
        return all(limit is not None and least > limit for limit in limits) and bool(limits)

    def _need(self, job: Job, split: Split, budget: Budget) -> _Need:
        """Return and cache the memory that a rank of a split takes when replayed in unlimited memory.

        The split is added to the traced splits. The trace, which may have a million events, is not kept.
        """
        kind = _kind_of_trace(budget)
        key = job, split.micro_batch, *kind
        if key not in self._needs:
            trace = self._traces.trace(job, split.micro_batch, budget.device.target)
            replay = replay_trace(trace, unlimited(budget.limits))
            likeness = judge_budget(budget, job, trace).likeness
            self._needs[key] = _Need(
                replay.peak_allocated_bytes, replay.peak_reserved_bytes, state_bytes_of(trace), likeness,
                trace.notes,
            )  # fmt: skip
        need = self._needs[key]
        traced = TracedSplit(split, need.allocated_bytes, need.reserved_bytes, need.state_bytes)
        self._traced.setdefault(kind, []).append(traced)
        return need


def _kind_of_trace(budget: Budget) -> tuple[object, ...]:
    return budget.device.target, unlimited(budget.limits).config


def _refusable(recipe: SplitRecipe, job: Job) -> str:
    """Return the name of a recipe's technique that a model may refuse, or "" if there is none.

    A checkpointing mode that the job itself asks for is supported.
    """
    if recipe.tp > 1:
        return f"tensor parallel over {recipe.tp} GPUs"
    if recipe.checkpoint is not job.loop.checkpoint:
        return "recomputation"
    return "DDP" if recipe.gathers is Gathers.NEVER else ""


def find_clusters(search: ClusterSearch, budgets: Sequence[BudgetOf]) -> tuple[ClusterPlans, ...]:
    """Return the plans for each kind of GPU: up to MOST_PLANS for one kind, one plan each for several."""
    most = MOST_PLANS if len(budgets) == 1 else 1
    return tuple(search.plans(budget_of, most) for budget_of in budgets)
