"""Assumptions of an answer, as sentences; an answer without them would claim too much."""

from msgspec.structs import fields

from planner.allocator import AllocatorConfig
from planner.hardware import MIB, Budget, Device, Likeness, margins_of
from planner.jobs import ClipGradients, Job, Lengths, MemoryFormat, Mode, Precision, ZeroGrad
from planner.planning import Estimate
from planner.report.describe import short_op
from planner.report.growth import growth_text

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
    """Return all assumptions, those on the GPU's figures included."""
    return (*_context(estimate.budget.device), *run_assumptions(estimate))


def run_assumptions(estimate: Estimate) -> tuple[str, ...]:
    """Return the assumptions that no table of the GPU shows."""
    return (
        *_growth(estimate),
        _calibration(estimate.budget),
        f"nothing else runs on the GPU; {_precision(estimate.job)}",
        _loop(estimate.job),
        *_lengths(estimate.budget.likeness),
        *_recipe(estimate.job),
        *_allocator(estimate.budget.limits.config),
        *_capability(estimate.budget.device),
        *estimate.notes,
        *_unknown(estimate.unknown_ops),
    )


def _growth(estimate: Estimate) -> tuple[str, ...]:
    return () if estimate.growth is None else (growth_text(estimate.growth, estimate.step_limit),)


def _calibration(budget: Budget) -> str:
    """Return the calibration that is used, and the width of its interval."""
    correction = budget.correction
    like = risk_sentence(budget.likeness)
    if correction is None:
        return f"no calibration is stored for this job and GPU; {like}"
    which = f"calibration at level '{correction.level}': {correction.about}"
    fit = correction.fit
    if fit is None:
        return f"{which}; the rest is not calibrated: {like}"
    over = "" if correction.includes_context else " without the context"
    besides = (
        f", and +- {correction.extra_spread_bytes / MIB:.0f} MiB from there"
        if correction.extra_spread_bytes
        else ""
    )
    return (
        f"{which}: {fit.overhead_bytes / MIB:.0f} MiB{over} + {fit.slope:.3f} x replay, "
        f"+- {fit.spread_bytes / MIB:.0f} MiB (one deviation) over {fit.points} runs{besides}"
    )


def risk_sentence(likeness: Likeness) -> str:
    """Return which published runs margins and probability rest on, and what of the job they lack."""
    margins = margins_of(likeness)
    own = margins.residuals
    counts = [(own.verdicts.outcomes, "outcome"), (own.peaks, "peak")]
    counted = " and ".join(f"{count} {word}{'s' * (count > 1)}" for count, word in counts if count)
    if likeness.unlike:
        return (
            f"no probability is given, since no published run {_listed(likeness.unlike)}; margins are the "
            f"widest of all published kinds ({margins.verdicts.scale:.1%} deviation)"
        )
    rests = f"margins and probability rest on {counted} of {own.runs}"
    if likeness.departures:
        rests += f"; widened, since none of these runs is {_listed(likeness.departures)}"
    return f"{rests}: {margins.verdicts.location:+.1%}, {margins.verdicts.scale:.1%} deviation"


def _listed(parts: tuple[str, ...]) -> str:
    return " or ".join(parts)


def _lengths(likeness: Likeness) -> tuple[str, ...]:
    """Return the assumption on samples of varying length, where there are such."""
    if likeness.lengths is Lengths.FIXED:
        return ()
    padding = "real samples vary in length and are padded to the longest of their batch, at most as given"
    by = f" (inferred from {likeness.padded}; --lengths fixed says otherwise)" if likeness.padded else ""
    return (f"{padding}{by}",)


def _context(device: Device) -> tuple[str, ...]:
    context = device.context
    spread = f" +- {context.spread / MIB:.0f}" if context.spread else ""
    return (f"the CUDA context takes {context.value / MIB:.0f}{spread} MiB: {context.source}",)


def _precision(job: Job) -> str:
    """Types and memory format of what the model computes with."""
    kind = _TYPES.get(job.precision, "")
    if job.precision in (Precision.AMP_FP16, Precision.AMP_BF16):
        last = "the backward pass" if job.backward_in_autocast else "the loss"
        sentence = f"CUDA's autocast to {kind} up to {last}, weights stay in float32"
    elif kind:
        sentence = f"no autocast, the model and its float32 inputs and targets are in {kind}"
    else:
        sentence = "no autocast, tensors keep the types that the model gives them"
    if job.grad_scaler and job.mode is Mode.TRAIN:
        sentence += "; the loss is scaled, no step is skipped"
    if job.memory_format is MemoryFormat.CHANNELS_LAST:
        sentence += "; weights and inputs with 4 or 5 dimensions are in channels_last"
    return sentence


def _loop(job: Job) -> str:
    steps = f"{job.steps} step" + "s" * (job.steps > 1)
    names = "each batch is released before the next is copied"
    if job.mode is Mode.INFER:
        return f"{steps} in eval mode without gradients; {names}, the output lives until the next is there"
    if job.mode is Mode.FORWARD:
        return f"{steps} in training mode with gradients recorded, no loss, no backward pass; {names}"
    if job.mode is Mode.GENERATE:
        return (
            f"{_times(job.steps)}, the prompt is read and {job.new_tokens} tokens are added to it greedily, "
            "no sequence ends before; the key-value cache grows by concatenation and goes with the call"
        )
    zeroed = "filled with zeros" if job.keep_grads else "set to None"
    when = _ZERO_GRAD[job.zero_grad]
    return f"{steps}, gradients {zeroed} {when}; {names}, output and loss live until the next are there"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _recipe(job: Job) -> tuple[str, ...]:
    """Return the meaning of each option of the loop."""
    if job.mode is not Mode.TRAIN:
        return ()
    clipped = {ClipGradients.NORM: "their norm", ClipGradients.VALUE: "their values"}.get(job.clip_gradients)
    views = "gradients are views of the buckets" if job.ddp_bucket_view else "beside the gradients themselves"
    evaluated = f"{job.eval_batch:,} samples" if job.eval_batch else "this size"
    sentences = {
        f"each step adds up the gradients of {job.accumulate} batches of this size": job.accumulate > 1,
        f"gradients are clipped by {clipped} before each step of the optimizer": clipped is not None,
        "a moving average of parameters and buffers is kept on the GPU": job.ema,
        f"before the last step, two batches of {evaluated} are evaluated without gradients; output and loss "
        "of the training live meanwhile, those of the evaluation afterwards": job.evaluate,
        "DistributedDataParallel with its defaults: all gradients in one bucket in the first step, then the "
        f"first of 1 MiB and others of 25; {views}": job.ddp,
        "NCCL's own memory is not counted; reported of A100s: 544 MB for two, 688 MB for more": job.ddp,
    }
    return tuple(sentence for sentence, is_so in sentences.items() if is_so)


def _allocator(config: AllocatorConfig) -> tuple[str, ...]:
    default = AllocatorConfig()
    changed = [
        f"{field.name}={getattr(config, field.name)}"
        for field in fields(AllocatorConfig)
        if getattr(config, field.name) != getattr(default, field.name)
    ]
    return (f"the allocator runs with {', '.join(changed)}",) if changed else ()


def _capability(device: Device) -> tuple[str, ...]:
    if not device.capability_source.startswith("assumed"):
        return ()
    major, minor = device.capability
    return (f"kernels as for compute capability {major}.{minor} ({device.capability_source})",)


def _unknown(ops: tuple[str, ...]) -> tuple[str, ...]:
    if not ops:
        return ()
    shown = ", ".join(map(short_op, ops[:6])) + (f" and {len(ops) - 6} more" if len(ops) > 6 else "")
    largest = (
        "; cuDNN's for convolutions is the largest, and --cudnn asks for it"
        if any("conv" in op for op in ops)
        else ""
    )
    return (f"scratch memory is not counted for {shown}{largest}",)
