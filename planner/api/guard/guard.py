"""`planner.guard`: plan an ordinary training loop, and measure it while it runs.

The plan is made before the first step.

    with planner.guard(model, optimizer, (images, labels), loss=criterion):
        for images, labels in loader:
            ...

A batch that most likely does not fit is refused before the first step, and an uncertain batch is warned of.
At the end the measured peaks are reported with the planned peaks. Nothing else in the training run changes.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

from planner._support.user_dirs import data_dir
from planner.api.guard.plan import GuardPlan, GuardRequest, plan_training
from planner.api.guard.result import GuardResult, result_of
from planner.api.request.options import Folder
from planner.errors import DoesNotFitError, UsageError, reason_of
from planner.planning.check import Verdict

if TYPE_CHECKING:
    from calibration.probe.training_meter import TrainingMeter

OnMisfit = Literal["raise", "warn"]


class GuardOptions(TypedDict, total=False):
    """The options with which a guard plans its loop, named as in `planner.estimate`.

    None counts as not given.
    """

    precision: str | None
    grad_scaler: bool | None
    backward_in_autocast: bool | None
    memory_format: str | None
    zero_grad: str | None
    keep_grads: bool | None
    accumulate: int | None
    clip_gradients: str | None
    ema: bool | None
    evaluate: bool | None
    eval_batch: int | None
    cudnn: str | None
    confidence: float | None  # default 0.99
    calibrations: Folder | list[Folder] | None  # folders that are searched first
    no_calibration: bool | None
    on_progress: Callable[[str], None] | None


class Guard:
    """A meter of a training loop's GPU memory, together with the plan made before the loop.

    `plan` is set from the start, and `result` at the end. Use the guard in a `with` statement, or call
    `start()` and `finish()` around the loop. `plan` is None if no plan could be made, and `result` is None if
    nothing was measured; a warning has given the reason.
    """

    def __init__(
        self,
        meter: "TrainingMeter | None",
        request: GuardRequest,
        plan: GuardPlan | None,
        store: Path | None,
        on_report: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.result: GuardResult | None = None
        self._request: GuardRequest | None = request
        self._meter, self._store, self._on_report = meter, store, on_report

    def start(self) -> Self:
        """Start measuring, which resets torch's peaks on the model's GPU. A failure only warns."""
        try:
            if self._meter is not None and self._request is not None:
                self._meter.start(self._request.plain_optimizer, self._request.watched)
        except Exception as error:  # whatever it is, the training goes on
            if self._meter is not None:
                self._meter.close()
            self._meter = None
            _warn(f"nothing is measured: {reason_of(error)}")
        return self

    def finish(self, error: BaseException | None = None) -> GuardResult | None:
        """Stop measuring; report and return the measured and planned peaks, or return None if not measured.

        `error` is the exception that ended the loop, if any. A failure of the report is only warned of.
        """
        meter, self._meter = self._meter, None
        request, self._request = self._request, None  # its model and optimizer are not kept alive
        try:
            if meter is not None and request is not None:
                self.result = result_of(meter, request, self.plan, self._store, error)
                self._on_report(f"{self.result}\n")
        except Exception as problem:
            _warn(f"nothing is reported: {reason_of(problem)}")
        return self.result

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(error)


def guard(
    model: Any,
    optimizer: Any,
    batch: Any,
    *,
    loss: str | Callable[..., Any] | None = None,
    step: Callable[[Any, Any], Any] | None = None,
    scaler: Any = None,
    on_misfit: OnMisfit = "raise",
    store: Folder | bool | None = None,
    on_report: Callable[[str], None] | None = None,
    **options: Unpack[GuardOptions],
) -> Guard:
    """Plan a training loop on the GPU that holds its model, and return a guard that measures the loop.

    `batch` is a batch from the data loader: inputs and target in a tuple or list, or a mapping of the model's
    keywords. `loss` is the loop's function of output and target, or a name as for `--loss`; with a mapping,
    the model returns its loss. Loops that do more give `step(model, batch)`, which returns the loss. `scaler`
    is the loop's `GradScaler`. Settings that the objects show (precision of the weights, a surrounding
    autocast region, channels_last, DistributedDataParallel, the optimizer's class and options) need no
    option.

    Raises DoesNotFitError before the first step if the batch most likely does not fit; with
    `on_misfit="warn"` it only warns. It also warns if the probability of running out of memory is above 1 -
    confidence, if no plan can be made, and if the model is not on a GPU; the training run continues.

    `store` is a folder in which the run is stored as an observation for calibrations, or True for the user's
    data folder, which later guards read. `on_report` is called with the report, which goes to standard error
    by default. Raises UsageError for an option that does not exist.
    """
    _check(on_misfit, options)
    folder = _folder(store)
    request = GuardRequest(model, optimizer, batch, loss, step, scaler, dict(options), folder)
    idle = Guard(None, request, None, folder, on_report or _to_stderr)
    try:
        meter = request.open_meter()
    except Exception as error:  # whatever it is, the training goes on
        _warn(f"nothing is planned or measured: {reason_of(error)}")
        return idle
    if meter is None:
        _warn("the model is not on an NVIDIA GPU: nothing is planned or measured")
        return idle
    plan = None
    try:
        plan = plan_training(request, meter)
        _act_on(plan, on_misfit)
    except DoesNotFitError:
        raise
    except Exception as error:
        _warn(f"no plan, the training goes on: {reason_of(error)}")
    return Guard(meter, request, plan, folder, on_report or _to_stderr)


def _act_on(plan: GuardPlan, on_misfit: OnMisfit) -> None:
    """Raise DoesNotFitError if the batch most likely does not fit, else issue the plan's warnings.

    With `on_misfit` "warn", a warning replaces the error.
    """
    if plan.judgement.verdict is Verdict.OUT_OF_MEMORY and on_misfit == "raise":
        raise DoesNotFitError(f"{plan.sentence()}; on_misfit='warn' tries it")
    if plan.is_uncertain:
        _warn(plan.sentence())
    for line in plan.unplanned:
        _warn(line)


def _check(on_misfit: str, options: GuardOptions) -> None:
    if on_misfit not in ("raise", "warn"):
        raise UsageError(f"on_misfit: unknown value {on_misfit!r}; use raise or warn")
    for name in options:
        if name not in GuardOptions.__annotations__:
            raise UsageError(f"planner.guard has no option {name!r}; it plans for the GPU of the model")


def _folder(store: Folder | bool | None) -> Path | None:
    """Return the folder in which to store observations, or None if `store` is false.

    Raises UsageError if `store` is True and no home folder is known.
    """
    if not store:
        return None
    if store is not True:
        return Path(store)
    folder = data_dir()
    if folder is None:
        raise UsageError("store: no home folder is known; give store=FOLDER")
    return folder / "calibrations"


def _warn(line: str) -> None:
    """Issue a warning at the user's line that called the guard."""
    package, level = str(Path(__file__).parents[1]), 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"planner.guard: {line}", stacklevel=level)


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)
