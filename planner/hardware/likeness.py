"""Compare a job with published runs, to derive the margins and the probability of an estimate.

If sizes are fixed and a cuDNN answers for the convolutions, the replay equals the replay of an emulated run,
and only the difference between a real and an emulated GPU is uncertain. If something else is open (workspaces
by a fitted term, `cudnn.benchmark`, lengths of texts), the distribution of published runs of the same kind is
used. Each doubt beyond the doubts of the kind widens the distribution. If a job has something that neither
emulated nor published runs show, no probability is given, and its margins are the widest of all kinds.
"""

from collections import Counter
from collections.abc import Iterator
from math import hypot
from statistics import NormalDist

from msgspec import Struct
from msgspec.structs import replace

from planner.hardware.residuals import (
    Doubt,
    DoubtSpread,
    KindSettings,
    Residuals,
    RunKind,
    Spread,
    load_residuals,
    quantile,
)
from planner.jobs import INSTALLED, STORED, Job, Lengths, MemoryFormat, Mode, Precision, TensorSpec
from planner.program import NEWEST_TORCH, Alloc, Category, ConvWorkspaceSource, Fact, Trace, torch_version_of

FEW_CONVOLUTIONS = 4  # this number or fewer only cut an image into patches: cuDNN's workspaces matter little
# The least share of convolutions in the memory that layers allocate, of the networks behind
# `Doubt.UNCOUNTED`. Among them the differences do not depend on it; if it is smaller, they are taken to be in
# proportion to it.
LEAST_PART = 0.056
MOSTLY = 0.5  # the least share of convolutions with a far lender, among the networks behind `Doubt.FAR`
LARGE_PARAMETERS = 10**9
FEW_PEAKS = 30  # with fewer peaks, a quantile of the peaks alone promises too much
CONVOLUTION = "aten.convolution.default"
_CONVOLUTIONS = (CONVOLUTION, "aten.convolution_backward.default")
_OF_LAYERS = (Category.ACTIVATION, Category.TEMPORARY)
_RECURRENT = ("_rnn", "lstm", "gru")
_DETECTION = ("nms", "roi_align")
# Inputs that tokenizers and feature extractors make, padded to the longest sample of a batch.
_PADDED = ("input_ids", "decoder_input_ids", "attention_mask", "token_type_ids", "padding_mask")
_HALF = (Precision.FP16, Precision.BF16)


class Departure(Struct, frozen=True):
    """A feature of a job that no published run of its kind has, with the doubt that it adds."""

    what: str  # the feature, as the end of a sentence
    doubt: Doubt = Doubt.SETTING
    weight: float = 1.0  # the factor on the doubt's deviations


class Likeness(Struct, frozen=True):
    """The published runs that a job resembles, and the differences from them."""

    kind: RunKind = RunKind.FIXED
    lengths: Lengths = Lengths.FIXED
    padded: str = ""  # the input that shows varying lengths; empty if the user gives them or they are fixed
    departures: tuple[Departure, ...] = ()  # each widens the margins
    unlike: tuple[str, ...] = ()  # features that no run has; if there is one, no probability is given


class MarginPart(Struct, frozen=True):
    """A contribution to the deviation of a job's memory need, as a fraction of the replay's need."""

    what: str
    scale: float
    rests_on: str  # a text that says which runs show it
    peak_scale: float = 0.0  # the same deviation of peaks on an empty GPU


class Margins(Struct, frozen=True):
    """The distribution of a job's memory need divided by its replay's need."""

    verdicts: Spread
    residuals: Residuals
    peak_widening: float  # the deviation that departures add to peaks
    parts: tuple[MarginPart, ...]  # their deviations, added in quadrature, are the deviation of `verdicts`

    def peak_ratio(self, confidence: float) -> float:
        """Return the quantile at `confidence`, at least 1, of a process's peak over its replayed peak."""
        ratios, verdicts = self.residuals.peak_ratios, self.verdicts
        z = NormalDist().inv_cdf(confidence)
        ratio = quantile(ratios, confidence) if ratios else 1.0
        if len(ratios) < FEW_PEAKS:
            ratio = max(ratio, 1 + verdicts.location + z * verdicts.scale)
        return max(1.0, 1 + hypot(ratio - 1, z * self.peak_widening))


def margins_of(likeness: Likeness) -> Margins:
    """Return the margins from the published runs of the job's kind, widened by the job's departures.

    If the job has a feature that no run has, the margins are the widest of all kinds. Raises DataFileError.
    """
    published = load_residuals()
    own = published.kinds[likeness.kind]
    spread = published.widest if likeness.unlike else own.verdicts
    parts = tuple(
        _part_of(departure, published.doubts[departure.doubt])
        for departure in (*likeness.departures, *map(Departure, likeness.unlike[:1]))
    )
    widening = hypot(*(part.scale for part in parts))
    parts = (MarginPart(likeness.kind.value, spread.scale, own.runs), *parts)
    if likeness.unlike:
        own = replace(own, peak_ratios=())
    elif likeness.kind in (RunKind.BENCHMARK, RunKind.BENCHMARK_LAST):
        own = replace(own, peak_ratios=published.kinds[RunKind.CONVOLUTIONS].peak_ratios)
    peak_widening = hypot(*(part.peak_scale for part in parts))
    return Margins(replace(spread, scale=hypot(spread.scale, widening)), own, peak_widening, parts)


def _part_of(departure: Departure, doubt: DoubtSpread) -> MarginPart:
    weight = departure.weight
    return MarginPart(departure.what, weight * doubt.scale, doubt.rests_on, weight * doubt.peak_scale)


def likeness_of(job: Job, trace: Trace, capability: tuple[int, int]) -> Likeness:
    """Return the `Likeness` of a job to published runs, by its options, operators and parameters."""
    sites = Counter(site.op for site in trace.sites)
    lengths, padded = lengths_of(job, trace)
    kind = kind_of(job, trace)
    departures = tuple(_departures(job, trace, sites, kind, lengths, capability))
    return Likeness(kind, lengths, padded, departures, tuple(_unlike(job, trace, sites)))


def kind_of(job: Job, trace: Trace) -> RunKind:
    """Return the kind of published runs that is most similar to a job."""
    sites = Counter(site.op for site in trace.sites)
    if sites[CONVOLUTION] > FEW_CONVOLUTIONS:
        is_fitted = trace.conv_account.source is ConvWorkspaceSource.PUBLISHED
        if is_fitted and job.loop.precision is Precision.FP32 and not job.environment.cudnn_benchmark:
            return RunKind.CONVOLUTIONS
        if is_fitted or job.environment.cudnn_benchmark:
            is_last = job.model.memory_format is MemoryFormat.CHANNELS_LAST
            return RunKind.BENCHMARK_LAST if is_last else RunKind.BENCHMARK
    if _is_large(job, trace):
        return RunKind.LARGE
    return RunKind.TEXTS if lengths_of(job, trace)[0] is Lengths.VARYING else RunKind.FIXED


def kind_without_trace(job: Job) -> RunKind:
    """Return TEXTS if the lengths of a job's samples vary by its options, else CONVOLUTIONS.

    If the options do not say whether lengths vary, they vary if an input is a sequence of integers.
    """
    if job.samples.lengths is not None:
        return RunKind.TEXTS if job.samples.lengths is Lengths.VARYING else RunKind.CONVOLUTIONS
    has_tokens = any(len(spec.shape) == 1 and _is_integer(spec) for spec in job.samples.inputs)
    return RunKind.TEXTS if has_tokens else RunKind.CONVOLUTIONS


def lengths_of(job: Job, trace: Trace) -> tuple[Lengths, str]:
    """Return VARYING or FIXED for the lengths of real samples, and the input that shows that they vary.

    The input is "" if the user gives the lengths, or if samples do not vary.

    Token ids have one dimension and are looked up in an embedding, or are named as tokenizers name them.
    Integer labels and class maps are neither.
    """
    if job.samples.lengths is not None:
        return job.samples.lengths, ""
    has_embedding = any("embedding" in site.op for site in trace.sites)
    for spec in job.samples.inputs:
        name = (spec.keyword or "").rpartition(".")[2]  # of an entry of a nested input
        if len(spec.shape) == 1 and (name in _PADDED or (has_embedding and _is_integer(spec))):
            return Lengths.VARYING, str(spec)
    return Lengths.FIXED, ""


def _weight_of_part(part: float) -> float:
    return round(min(1.0, part / LEAST_PART), 2)


def part_of_convolutions(trace: Trace) -> float:
    """Return the share of convolutions in the bytes of activations and temporary blocks."""
    numbers = {number for number, site in enumerate(trace.sites) if site.op in _CONVOLUTIONS}
    own = every = 0
    for event in trace.events:
        if isinstance(event, Alloc) and event.category in _OF_LAYERS:
            every += event.size_bytes
            own += event.size_bytes if event.site in numbers else 0
    return own / every if own else 0.0


def _is_integer(spec: TensorSpec) -> bool:
    return spec.dtype.startswith("int")


def _is_large(job: Job, trace: Trace) -> bool:
    owned = (
        event for event in trace.events if isinstance(event, Alloc) and event.category is Category.PARAMETER
    )
    element = 2 if job.loop.precision in _HALF else 4
    return sum(event.size_bytes for event in owned) >= LARGE_PARAMETERS * element


def _unlike(job: Job, trace: Trace, sites: Counter[str]) -> Iterator[str]:
    """Yield the job's features for which no probability is given.

    Each is the end of a sentence. The features are sizes that depend on values, generation, and sharding over
    several GPUs.
    """
    if any(word in op for op in sites for word in _DETECTION) or Fact.RANDOM_SIZES in trace.facts:
        yield "has tensors whose sizes depend on values, as detectors do"
    if job.loop.mode is Mode.GENERATE:
        yield "generates"
    if job.sharding.fsdp or job.sharding.tp or job.sharding.world_size:
        yield "is sharded over several GPUs"


def _departures(
    job: Job, trace: Trace, sites: Counter[str], kind: RunKind, lengths: Lengths, capability: tuple[int, int]
) -> Iterator[Departure]:
    """Yield a departure for each feature that no published run of the kind has."""
    settings, has_volumes = load_residuals().kinds[kind].settings, _has_volumes(job, trace)
    if settings is not None:
        yield from map(Departure, _other_settings(job, sites, settings, capability))
    elif sites[CONVOLUTION] > FEW_CONVOLUTIONS or has_volumes:
        yield from _of_answers(job, trace, has_volumes)
    uncounted, far = trace.conv_account.uncounted_share, trace.conv_account.far_share
    far = 0.0 if has_volumes else far  # `Doubt.VOLUMES` includes the effect of the distance
    if uncounted or far:
        yield from departures_by_share(uncounted, far, part_of_convolutions(trace))
    yield from map(Departure, _unmeasured(job, sites, has_volumes))
    if lengths is Lengths.VARYING and kind not in (RunKind.TEXTS, RunKind.LARGE):
        yield Departure("with samples of varying lengths")
    if any("convolution" not in op for op in trace.unknown_ops):
        yield Departure("with operators whose scratch memory is not known")


def _other_settings(
    job: Job, sites: Counter[str], settings: KindSettings, capability: tuple[int, int]
) -> Iterator[str]:
    """Yield a text for each setting of the job or GPU that no published run of the job's kind has.

    The settings are the precision and the compute capability, and with convolutions cudnn.benchmark and the
    memory format.
    """
    if job.loop.precision.value not in settings.precisions:
        yield f"in {job.loop.precision.value}"
    if sites[CONVOLUTION] and job.environment.cudnn_benchmark not in settings.cudnn_benchmark:
        yield f"with cudnn.benchmark {'on' if job.environment.cudnn_benchmark else 'off'}"
    if sites[CONVOLUTION] and job.model.memory_format.value not in settings.memory_formats:
        yield f"in {job.model.memory_format.value}"
    if capability not in settings.capabilities:
        yield f"on compute capability {capability[0]}.{capability[1]}"


def _of_answers(job: Job, trace: Trace, has_volumes: bool) -> Iterator[Departure]:
    """Yield departures for workspaces from stored answers, similar convolutions, or a different cuDNN."""
    source = trace.conv_account.source
    if source is ConvWorkspaceSource.STORED:
        yield Departure("with stored answers for convolutions", Doubt.STORED)
    if source is ConvWorkspaceSource.SIMILAR:
        what = "with stored answers for similar convolutions"
        if has_volumes:
            yield Departure(what, Doubt.VOLUMES, _weight_of_part(part_of_convolutions(trace)))
        else:
            yield Departure(what, Doubt.SIMILAR)
    is_named = job.environment.cudnn not in ("", INSTALLED, STORED)
    if not is_named and torch_version_of(job.environment.torch) < NEWEST_TORCH:
        yield Departure(f"with torch {job.environment.torch}, whose cuDNN is another")


def departures_by_share(uncounted: float, far: float, part: float) -> Iterator[Departure]:
    """Yield departures for convolutions with unknown or doubtful workspaces.

    A workspace is doubtful if it comes from a dissimilar convolution. `uncounted` and `far` are the shares of
    both groups in all convolutions, `part` is the result of `part_of_convolutions`.
    """
    of_convolutions = _weight_of_part(part)
    if weight := round(uncounted * of_convolutions, 2):
        what = f"with no workspace known for {uncounted:.0%} of its convolutions"
        yield Departure(what, Doubt.UNCOUNTED, weight)
    if weight := round(min(1.0, far / MOSTLY) * of_convolutions, 2):
        what = f"with workspaces borrowed from much larger or smaller ones for {far:.0%} of its convolutions"
        yield Departure(what, Doubt.FAR, weight)


def _has_volumes(job: Job, trace: Trace) -> bool:
    """Return whether the job has three-dimensional convolutions.

    The convolutions with workspaces decide. Without workspaces, an input of four dimensions counts as a
    volume, although it may be a sequence of images.
    """
    convolutions = trace.convolution_by_block().values()
    if not convolutions:
        return 4 in _ranks_of_inputs(job)
    return any(len(one.x) == 5 for one in convolutions)


def _ranks_of_inputs(job: Job) -> set[int]:
    return {len(spec.shape) for spec in job.samples.inputs if not _is_integer(spec)}


def _unmeasured(job: Job, sites: Counter[str], has_volumes: bool) -> Iterator[str]:
    """Yield the job's features that no measured run has, each as the end of a sentence."""
    ranks = _ranks_of_inputs(job)
    if sites[CONVOLUTION] and has_volumes:
        yield "with three-dimensional convolutions"
    if sites[CONVOLUTION] > FEW_CONVOLUTIONS and ranks and max(ranks) < 3:
        yield "with convolutions over sequences"
    if any(word in op for op in sites for word in _RECURRENT):
        yield "with recurrent layers"
    if job.loop.mode in (Mode.INFER, Mode.FORWARD):
        yield "without a backward pass"
