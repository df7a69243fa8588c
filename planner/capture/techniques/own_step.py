"""Record a user's own training step, or a trainer that runs the loop itself."""

from collections.abc import Callable

from msgspec.structs import replace
from torch import Tensor, optim

from planner.capture.cuda.devices.host_tensors import Side
from planner.capture.cuda.devices.placement import is_put_on_gpu, modules_on_cpu
from planner.capture.cuda.optimizers.libraries import optimizer_libraries
from planner.capture.failure_reasons import explain
from planner.capture.loop.batches import batch_loader
from planner.capture.loop.categories import set_categories, set_gradients
from planner.capture.loop.named_optimizers import state_tensors
from planner.capture.loop.own_step import parameters_of, run_own_steps, run_trainer
from planner.capture.loop.runtime import Batch
from planner.capture.models.meta_init import like_on_meta
from planner.capture.models.transformers.own_trainer import TrainerModule
from planner.capture.models.user_code.step import StepModule
from planner.capture.recorder.recorder import Recorder
from planner.capture.setup import record_setup
from planner.capture.techniques.technique import CapturedLoop, Notes, Technique
from planner.capture.wrapped import is_wrapped
from planner.errors import ModelError, PlannerError
from planner.jobs import Job, Mode
from planner.program import Category, Fact, Phase, Trace

BATCH_ON_GPU_NOTE = (
    "its step does not move the batch, which is planned on the GPU, as from a loader that moves it"
)


class SidesMetError(PlannerError):
    """Raised if a step uses tensors of the CPU and the GPU together. Its cause explains the failure."""


def with_batch_on_gpu(run: Callable[[bool], Trace]) -> Trace:
    """Trace a step, and trace it again with its batches on the GPU if the step does not move them.

    The argument of `run` is whether batches are loaded to the GPU. Raises ModelError, which explains the
    first run's failure, if tensors of the CPU and the GPU meet in both runs.
    """
    try:
        return run(False)
    except SidesMetError as error:
        first = error.__cause__
    try:
        trace = run(True)
    except SidesMetError:
        raise first or AssertionError from None
    return replace(trace, notes=(*trace.notes, BATCH_ON_GPU_NOTE))


def run_steps(loop: CapturedLoop) -> Notes:
    """Record the set-up and steps of a user's training step or trainer, and return notes for the trace.

    Raises SidesMetError if a step uses tensors of the CPU and the GPU together.
    """
    job, model, recorder = loop.job, loop.model, loop.recorder
    assert isinstance(model, StepModule)
    recorder.start_phase(0, Phase.SETUP)
    _record_held(loop, model)

    def on_phase(step: int, phase: Phase) -> None:
        set_gradients(recorder, model.parameters())  # an optimizer may not have all parameters
        for optimizer in model.optimizers.values():
            set_categories(recorder, parameters_of(optimizer), optimizer)
        recorder.start_phase(step, phase)

    load_batch = batch_loader(model, job, loop.batch)

    def load() -> Batch:
        with recorder.host.moving_to(Side.GPU if loop.loads_to_gpu else Side.HOST):
            return load_batch()

    with optimizer_libraries(recorder.target.capability) as outside, recorder:
        if isinstance(model, TrainerModule):
            recorder.facts.add(Fact.WEIGHTS_FROM_HOST)  # `_load_from_checkpoint` of transformers/trainer.py
            return (*run_trainer(model, job, loop.batch, on_phase), *outside.notes())
        try:
            return (*run_own_steps(model, job, load, on_phase), *outside.notes())
        except Exception as error:
            if not recorder.host.have_met:
                raise
            raise SidesMetError(job.model.name) from explain(job, loop.batch, recorder, error)


def _record_held(loop: CapturedLoop, model: StepModule) -> None:
    """Record the tensors that a user's step holds before its first call.

    No variable of a function that is still running may refer to these tensors: the step may replace a
    tensor, which must free it.
    """
    job, recorder = loop.job, loop.recorder
    if isinstance(model, TrainerModule):
        for tensor in model.tensors_on_host():
            recorder.host.add(tensor)
    _leave_on_cpu(model, job, recorder, moves_batch=not loop.loads_to_gpu)
    record_setup(model, job, recorder, loop.loaded)
    model.held_tensors.clear()
    for optimizer in model.optimizers.values():  # some make their state when constructed
        defaults = getattr(optimizer, "defaults", {})  # wrappers of optimizers may have none
        counts_on_gpu = bool(defaults.get("fused") or defaults.get("capturable"))
        _move_states(optimizer, counts_on_gpu)
        for tensor in state_tensors(optimizer):
            if tensor.dim() or counts_on_gpu:
                recorder.record_tensor(tensor, Category.OPTIMIZER, "state")


def _move_states(optimizer: optim.Optimizer, counts_on_gpu: bool) -> None:
    """Replace CPU tensors in an optimizer's state by meta tensors, except counts of steps in most cases.

    The optimizer may have made steps on the CPU. Only states of parameters on the meta device are changed.
    Unless `counts_on_gpu`, counts of steps stay on the CPU, and are copied, since the planned steps change
    them.
    """
    for parameter, states in optimizer.state.items():
        for name, one in states.items() if isinstance(parameter, Tensor) and parameter.is_meta else ():
            if isinstance(one, Tensor) and not one.is_meta:
                states[name] = like_on_meta(one) if one.dim() or counts_on_gpu else one.clone()


def _leave_on_cpu(model: StepModule, job: Job, recorder: Recorder, *, moves_batch: bool) -> None:
    """Mark as CPU tensors the parameters and buffers that user code leaves on the CPU.

    The tensors of modules that user code moved to the CPU are marked. If user code moves its batch and some
    of the step's tensors to the GPU, all other tensors are marked too, except tensors loaded from a file and
    the tensors of a Trainer or of several ranks, which a library may move. Raises ModelError if all
    parameters are on the CPU.
    """
    held, tensors = modules_on_cpu(), (*model.parameters(), *model.buffers())
    is_moved_by_file = moves_batch and job.sharding.ranks == 1 and not isinstance(model, TrainerModule)
    moves_some = is_moved_by_file and any(map(is_put_on_gpu, tensors))
    on_cpu = [module for module in model.modules() if moves_some or module in held]
    for module in on_cpu:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if not is_wrapped(tensor) and not is_put_on_gpu(tensor):  # later, as by `to_empty`
                recorder.host.add(tensor)
    if on_cpu and all(not is_wrapped(one) and one in recorder.host for one in model.parameters()):
        raise ModelError(f"{job.model.name}: its code moves its modules to the CPU; name the device cuda")


OWN_STEP = Technique(lambda job: job.loop.mode is Mode.STEP, run_loop=run_steps)
