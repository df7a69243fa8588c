"""For Python: one job's memory against batch size, on every card of the database."""

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from planner.api.gpus import gpus
from planner.api.options import Options
from planner.api.request import Model, budget_of, ignore_progress
from planner.hardware import ENDLESS_BYTES, Budget, Device, judge_budget, load_devices
from planner.planning import FIT_BATCHES, BatchCurve, take_curve
from planner.store import open_saved


def batch_curve(
    model: Model | None = None,
    batch: int = 1,
    *,
    devices: Sequence[Device] | None = None,
    **options: Unpack[Options],
) -> BatchCurve | None:
    """The curves of all cards, or of `devices`; the card of the options stands among them and is chosen.

    Without one, a card without end comes first. None where a saved trace holds for one batch size only.
    Raises the errors of `planner.errors`.
    """
    path = options.get("trace")
    if path is not None and not open_saved(Path(path)).traces.is_any_batch:
        return None
    asked = budget_of(options)
    cards = list(load_devices() if devices is None else devices)
    endless = asked.device.total.value >= ENDLESS_BYTES
    if not endless and asked.device not in cards:
        cards.insert(0, asked.device)
    # Kept traces end where a rule takes another way, and each batch size beyond is a run of the model: for so
    # many of them a loop of its own is faster.
    rest: Options = {**options, "gpu": None, "gpu_mib": None, "save_trace": None, "cache": None}
    table = gpus(model, devices=cards, sort="memory", **rest).table
    (options.get("on_progress") or ignore_progress)(f"replaying {len(table.fits)} GPUs")
    known: list[tuple[Budget, int | None]] = [(fit.budget, fit.max_batch) for fit in table.fits]
    if endless:
        first = table.traces.at(FIT_BATCHES[0], asked.device.target)
        known.insert(0, (judge_budget(asked, table.job, first), None))
    names = [budget.device.name for budget, _ in known]
    return take_curve(known, table.traces, batch, names.index(asked.device.name))
