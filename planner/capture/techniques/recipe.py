"""Record the training loop that a job's options describe."""

from collections.abc import Iterator

from msgspec.structs import replace
from torch import nn

from planner.capture.cuda.optimizers.libraries import optimizer_libraries
from planner.capture.loop.batches import batch_loader, evaluation_loader
from planner.capture.loop.categories import set_categories
from planner.capture.loop.criterion import Criterion, build_criterion
from planner.capture.loop.named_optimizers import prepare_optimizer
from planner.capture.loop.precision import convert_model, meta_runtime
from planner.capture.loop.trainable import freeze_parameters
from planner.capture.loop.training_loop import run_loop, with_few_micro_batches
from planner.capture.models.libraries import quiet
from planner.capture.models.live.job import evaluated_loader
from planner.capture.models.live.optimizer import optimizer_maker
from planner.capture.recorder.recorder import Recorder
from planner.capture.setup import record_setup
from planner.capture.techniques.technique import BuiltModel, CapturedLoop, Notes, Technique, is_always_used
from planner.jobs import Job, Loss, Mode
from planner.program import Category, Fact, Phase


def _convert(model: BuiltModel, job: Job) -> BuiltModel:
    with quiet():  # diffusers advises against conversions
        return replace(model, module=convert_model(model.module, job))


def _freeze(model: BuiltModel, job: Job) -> BuiltModel:
    freeze_parameters(model.module, job)
    return model


def run_recipe(loop: CapturedLoop) -> Notes:
    """Record the set-up and the steps of a job, and return notes for the trace."""
    job, model, recorder = loop.job, loop.model, loop.recorder
    if job.loop.loss is Loss.TRAINING_STEP:
        recorder.facts.add(Fact.WEIGHTS_FROM_HOST)  # as Lightning's strategies load checkpoints
    recorder.start_phase(0, Phase.SETUP)
    record_setup(model, job, recorder, loop.loaded)
    criterion = build_criterion(job)
    parameters = [*model.parameters(), *_record_criterion(criterion, recorder)]
    if criterion is not None and not criterion.takes_target:
        job = job.replace(target=None, targets=())
    make = optimizer_maker(model, job) if job.loop.mode is Mode.TRAIN else None
    with optimizer_libraries(recorder.target.capability) as outside, recorder:
        optimizer = None if make is None else make(model, parameters)

        def on_phase(step: int, phase: Phase) -> None:
            if optimizer is not None:
                set_categories(recorder, parameters, optimizer)
            for technique in loop.techniques:
                technique.on_phase(parameters, recorder)
            recorder.start_phase(step, phase)

        runtime = replace(meta_runtime(job), set_category=recorder.set_category, criterion=criterion)
        load_evaluated = evaluated_loader(model, loop.batch)
        if load_evaluated is None and (job.loop.eval_batch or job.loop.eval_input):
            load_evaluated = evaluation_loader(model, job, loop.batch)
        load_batch = batch_loader(model, job, loop.batch)
        short, notes = with_few_micro_batches(job)
        for technique in loop.techniques:
            load_batch = technique.change_loader(load_batch, model, short)
        notes = (*run_loop(model, short, load_batch, optimizer, on_phase, runtime, load_evaluated), *notes)
        notes += outside.notes()
    return notes if criterion is None else (*notes, *criterion.notes())


def _record_criterion(criterion: Criterion | None, recorder: Recorder) -> Iterator[nn.Parameter]:
    """Record the tensors of a loss module, if the loss has one, and yield its parameters."""
    module = None if criterion is None else criterion.module
    if module is not None:
        name = type(module).__name__
        for tensor in (*module.parameters(), *module.buffers()):
            recorder.record_tensor(tensor, Category.PARAMETER, "to", name)
        yield from module.parameters()


PRECISION = Technique(is_always_used, change_model=_convert)
FREEZING = Technique(is_always_used, change_model=_freeze)
RECIPE = Technique(is_always_used, prepare=prepare_optimizer, run_loop=run_recipe)
