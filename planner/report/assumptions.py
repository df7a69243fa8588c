"""Describe the assumptions of an estimate in sentences."""

from collections.abc import Iterator

from msgspec.structs import asdict

from planner.allocator import AllocatorConfig
from planner.hardware import MIB, NOT_MODELLED, Budget, Likeness, margins_of
from planner.jobs import (
    ClipGradients,
    Job,
    Lengths,
    Loss,
    MemoryFormat,
    Mode,
    Precision,
    ZeroGrad,
    is_torchtitan,
    split_model,
)
from planner.planning import Estimate, count_ranks
from planner.program import NEWEST_TORCH, torch_version_of
from planner.report.budget import planned_torch
from planner.report.describe import growth_text, short_op

_ZERO_GRAD = {
    ZeroGrad.BEFORE_FORWARD: "before each forward pass",
    ZeroGrad.BEFORE_BACKWARD: "before each backward pass",
    ZeroGrad.AFTER_STEP: "after each step of the optimizer",
}
_TYPES = {
    Precision.AMP_FP16: "float16",
    Precision.FP16: "float16",
    Precision.AMP_BF16: "bfloat16",
    Precision.BF16: "bfloat16",
}


def assumptions(estimate: Estimate) -> tuple[str, ...]:
    """Return sentences on the assumptions of an estimate, with the memory of the CUDA context and NCCL."""
    context = estimate.budget.device.context
    spread = f" +- {context.spread / MIB:.0f}" if context.spread else ""
    taken = f"the CUDA context takes {context.value / MIB:.0f}{spread} MiB: {context.source}"
    nccl = estimate.budget.device.nccl
    own = (
        []
        if nccl is None
        else [f"NCCL takes {nccl.value / MIB:.0f} +- {nccl.spread / MIB:.0f} MiB: {nccl.source}"]
    )
    return (taken, *own, *run_assumptions(estimate))


def run_assumptions(estimate: Estimate) -> tuple[str, ...]:
    """Return the assumptions of an estimate without the memory of the CUDA context and NCCL.

    A table of the GPU's memory shows the omitted figures.
    """
    return tuple(_run_assumptions(estimate))


def _run_assumptions(estimate: Estimate) -> Iterator[str]:
    if estimate.growth is not None:
        yield growth_text(estimate.growth, estimate.step_limit)
    yield from job_assumptions(estimate.job, estimate.budget)
    yield from _ranks(estimate)
    yield from estimate.notes
    if estimate.unknown_ops:
        yield unknown_sentence(estimate.unknown_ops)


def _ranks(estimate: Estimate) -> Iterator[str]:
    """Yield a sentence on which ranks of the job are planned, or nothing for a job of one rank."""
    job, planned = estimate.job, sum(len(row.ranks) for row in estimate.ranks)
    count = count_ranks(job)
    if count == 1:
        return
    if planned == 0:
        caveat = "; others may hold more" if job.sharding.world_size or job.sharding.rank else ""
        yield f"rank {job.sharding.rank} of {count} alone is planned{caveat}"
    elif planned < count:
        yield f"{planned} of {count} ranks are planned, of which rank {job.sharding.rank} takes most"
    elif len(estimate.ranks) > 1:
        yield f"of {count} ranks rank {job.sharding.rank} takes most"
    else:
        yield f"all {count} ranks take the same"


def job_assumptions(job: Job, budget: Budget) -> Iterator[str]:
    """Yield sentences on the assumptions about a job and its GPU that hold at every batch size."""
    if sentence := NOT_MODELLED.get(budget.device.vendor):
        yield sentence
    yield _calibration(budget)
    yield _torch(job)
    yield f"nothing else runs on the GPU; {_precision(job)}"
    yield _loop(job)
    if budget.likeness.lengths is not Lengths.FIXED:
        padded = budget.likeness.padded
        by = f" (inferred from {padded}; --lengths fixed overrides that)" if padded else ""
        padding = "real samples vary in length and are padded to the longest of their batch, at most as given"
        yield f"{padding}{by}"
    yield from _recipe(job)
    if changed := _changed(budget.limits.config):
        yield f"the allocator runs with {', '.join(changed)}"
    if budget.device.capability_source.startswith("assumed"):
        major, minor = budget.device.capability
        yield f"kernels as for compute capability {major}.{minor} ({budget.device.capability_source})"


def _torch(job: Job) -> str:
    """Return a sentence with the torch version whose memory is planned."""
    planned = planned_torch(job)
    asked = job.environment.torch
    if torch_version_of(asked) > NEWEST_TORCH:
        return f"torch {asked} is newer than the newest version known, so memory is that of torch {planned}"
    return f"memory is taken as by torch {planned}"


def _calibration(budget: Budget) -> str:
    """Return a sentence on the source of the margins: a calibration, published runs, or both."""
    correction = budget.correction
    like = risk_sentence(budget.likeness)
    if correction is None:
        return f"no calibration is stored for this job and GPU; {like}"
    which = f"calibration at level '{correction.level}': {correction.about}"
    fit = correction.fit
    if fit is None:
        return f"{which}; the rest is not calibrated: {like}"
    over = "" if correction.includes_context else " without the context"
    drift = correction.extra_spread_bytes / MIB
    besides = f", and +- {drift:.0f} MiB from there" if drift else ""
    return (
        f"{which}: {fit.overhead_bytes / MIB:.0f} MiB{over} + {fit.slope:.3f} x replay, "
        f"+- {fit.spread_bytes / MIB:.0f} MiB (one deviation) over {fit.points} runs{besides}"
    )


def risk_sentence(likeness: Likeness) -> str:
    """Return a sentence on the published runs behind the margins and the probability.

    It says why if no probability is given.
    """
    margins = margins_of(likeness)
    own = margins.residuals
    counts = [(own.verdicts.outcomes, "outcome"), (own.peaks, "peak")]
    counted = " and ".join(f"{count} {word}{'s' * (count > 1)}" for count, word in counts if count)
    if unlike := " or ".join(likeness.unlike):
        return (
            f"no probability is given, since no run that is known {unlike}; margins are the "
            f"widest of all published kinds ({margins.verdicts.scale:.1%} deviation)"
        )
    first, *others = margins.parts
    rests = (
        f"margins and probability rest on {counted} of {own.runs}: {margins.verdicts.location:+.1%}, "
        f"{first.scale:.1%} deviation"
    )
    if not others:
        return rests
    further = ", ".join(f"{part.scale:.1%} {part.what}" for part in others)
    return f"{rests}; in addition {further}: {margins.verdicts.scale:.1%} in all"


def _precision(job: Job) -> str:
    """Return a sentence on the precision, loss scaling and memory format of the computation."""
    kind = _TYPES.get(job.loop.precision, "")
    if job.loop.mode is Mode.STEP:
        sentence = "its own step decides the types of tensors and where it autocasts"
    elif job.sharding.deepspeed:
        sentence = "the engine casts the model as DeepSpeed's configuration says"
    elif job.loop.precision in (Precision.AMP_FP16, Precision.AMP_BF16):
        last = "the backward pass" if job.loop.backward_in_autocast else "the loss"
        sentence = f"CUDA's autocast to {kind} up to {last}, weights stay in float32"
    elif kind:
        sentence = f"no autocast, the model and its float32 inputs and targets are in {kind}"
    else:
        sentence = "no autocast, tensors keep the types that the model gives them"
    if job.loop.grad_scaler and job.loop.mode is Mode.TRAIN:
        sentence += "; the loss is scaled, no step is skipped"
    if job.model.memory_format is MemoryFormat.CHANNELS_LAST:
        sentence += "; weights and inputs with 4 or 5 dimensions are in channels_last"
    return sentence


def _loop(job: Job) -> str:
    steps = f"{job.loop.steps} step" + "s" * (job.loop.steps > 1)
    names = "each batch is released before the next is copied"
    if job.loop.mode is Mode.INFER:
        return f"{steps} in eval mode without gradients; {names}, the output lives until the next is there"
    if job.loop.mode is Mode.FORWARD:
        return f"{steps} in training mode with gradients recorded, no loss, no backward pass; {names}"
    if job.loop.mode is Mode.GENERATE:
        times = "once" if job.loop.steps == 1 else f"{job.loop.steps} times"
        return (
            f"{times}, the prompt is read and {job.loop.new_tokens} tokens are added to it greedily, "
            "no sequence ends before; the key-value cache grows by concatenation and goes with the call"
        )
    if job.loop.mode is Mode.STEP:
        return "the result of its own step lives until the next is there"
    zeroed = "filled with zeros" if job.loop.keep_grads else "set to None"
    when = _ZERO_GRAD[job.loop.zero_grad]
    if job.loop.drop_output:
        lives = "the output is freed once its loss is there, which lives until the next one"
    else:
        lives = "output and loss live until the next are there"
    return f"{steps}, gradients {zeroed} {when}; {names}, {lives}"


def _sharding(job: Job) -> str:
    """Return a phrase on how an FSDP2 model is created, sharded and offloaded."""
    if job.sharding.fsdp_arg.by == "accelerate":
        return "the model is made on the CPU, and each block is moved whole, then sharded"
    offloaded = "; parameters, gradients and the optimizer's state on the CPU, in memory that torch pins"
    made = "the model is made on meta, sharded, then allocated"
    return made + offloaded if job.sharding.fsdp_arg.offload else made


def _kept(job: Job) -> str:
    """Return a clause on the tensors that stay alive during and after an evaluation."""
    if job.loop.loss is Loss.TRAINING_STEP:
        return "Lightning releases the gradients and the training's batch before, its own batches afterwards"
    if job.loop.drop_output:
        return "the loss of the training lives meanwhile, that of the evaluation afterwards"
    return "output and loss of the training live meanwhile, those of the evaluation afterwards"


def _recipe(job: Job) -> tuple[str, ...]:
    """Return a sentence for each training option in use, such as accumulation or clipping.

    The options are accumulation, clipping, EMA, evaluation, sharding, torchtitan and nnU-Net. Returns () for
    a job whose mode is not `TRAIN`.
    """
    if job.loop.mode is not Mode.TRAIN:
        return ()
    clipped = {ClipGradients.NORM: "their norm", ClipGradients.VALUE: "their values"}.get(
        job.loop.clip_gradients
    )
    views = (
        "gradients are views of the buckets"
        if job.sharding.ddp_bucket_view
        else "in addition to the gradients themselves"
    )
    evaluated = f"{job.loop.eval_batch:,} samples" if job.loop.eval_batch else "this size"
    evaluated += f", with input {' and '.join(job.loop.eval_input)}," if job.loop.eval_input else ""
    ranks, accumulate = job.sharding.fsdp, job.loop.accumulate
    sentences = {
        f"each step adds up the gradients of {accumulate} batches of this size": accumulate > 1,
        f"gradients are clipped by {clipped} before each step of the optimizer": clipped is not None,
        "a moving average of parameters and buffers is kept on the GPU": job.loop.ema,
        f"before the last step, two batches of {evaluated} are evaluated without gradients; {_kept(job)}": (
            job.loop.evaluate
        ),
        "DistributedDataParallel with its defaults: all gradients in one bucket in the first step, then the "
        f"first of 1 MiB and others of 25; {views}": job.sharding.ddp,
        f"FSDP2 over {ranks} ranks; the batch size is a rank's; {_sharding(job)}": ranks,
        f"{job.model.name} of torchtitan is planned as transformers' Llama of its sizes in the planner's "
        "loop; torchtitan's own layers and loss may keep other tensors": is_torchtitan(job.model.name),
        f"tensor parallel over {job.sharding.tp} ranks, which share their batch; the optimizer has a group "
        "of parameters for each mesh, as transformers' Trainer has": job.sharding.tp,
        f"nnU-Net itself runs with {_unlike_nnunet(job)}": bool(_unlike_nnunet(job)),
    }
    return tuple(sentence for sentence, is_so in sentences.items() if is_so)


def _unlike_nnunet(job: Job) -> str:
    """Return text on the defaults of nnU-Net that the plan lacks, or "" if the model is not nnU-Net's."""
    if split_model(job.model.origin).source != "nnunet":
        return ""
    timed = "" if job.environment.cudnn_benchmark else "cudnn.benchmark (--cudnn-benchmark) and "
    return f"{timed}its network compiled, which is not planned; nnUNet_compile=f switches that off"


def _changed(config: AllocatorConfig) -> list[str]:
    """Return the allocator's settings that differ from the defaults, as NAME=VALUE."""
    defaults = asdict(AllocatorConfig())
    return [f"{name}={value}" for name, value in asdict(config).items() if value != defaults[name]]


def unknown_sentence(ops: tuple[str, ...]) -> str:
    """Return a sentence which says that the scratch memory of the operators `ops` is not counted."""
    shown = ", ".join(map(short_op, ops[:6])) + (f" and {len(ops) - 6} more" if len(ops) > 6 else "")
    return f"scratch memory is not counted for {shown}"
