"""Similarity of a job to published runs, which decides how sure an answer may be.

A job of a published kind has that kind's distribution. Each setting in which it differs from all runs of the
kind widens the distribution by the deviation between kinds. Where a job has something that no published run
has, no probability is given, and its margins are the widest of all kinds.
"""

from collections import Counter
from collections.abc import Iterator
from math import hypot, sqrt
from statistics import NormalDist

from msgspec import Struct
from msgspec.structs import replace

from planner.hardware.residuals import Residuals, RunKind, Spread, load_residuals, quantile
from planner.jobs import Job, Lengths, MemoryFormat, Mode, Precision, TensorSpec
from planner.program import Alloc, Category, Trace

FEW_CONVOLUTIONS = 4  # up to so many cut an image into patches, and workspaces of cuDNN matter little
LARGE_PARAMETERS = 10**9
FEW_PEAKS = 30  # below, a quantile of them alone promises too much
CONVOLUTION = "aten.convolution.default"
_FUSED_ATTENTION = "scaled_dot_product"
_UNFUSED_ATTENTION = ("aten._softmax.default", "aten.bmm.default")
_RECURRENT = ("_rnn", "lstm", "gru")
_DETECTION = ("nms", "roi_align")
# Inputs that tokenizers and feature extractors make, padded to the longest sample of a batch.
_PADDED = ("input_ids", "decoder_input_ids", "attention_mask", "token_type_ids", "padding_mask")
_HALF = (Precision.FP16, Precision.BF16)


class Likeness(Struct, frozen=True):
    """The published runs that a job is like."""

    kind: RunKind = RunKind.CONVOLUTIONS
    lengths: Lengths = Lengths.FIXED
    padded: str = ""  # the input that shows varying lengths; "" where the user gives them, or none does
    departures: tuple[str, ...] = ()  # what no run of the kind has; each widens
    unlike: tuple[str, ...] = ()  # what no published run has; no probability is given


class Margins(Struct, frozen=True):
    """The distribution of a job's memory needs over those of its replay."""

    verdicts: Spread
    residuals: Residuals
    widening: float  # the deviation that departures add

    def peak_ratio(self, confidence: float) -> float:
        """Return the ratio that a share `confidence` of process peaks stays within, at least 1."""
        ratios, verdicts = self.residuals.peak_ratios, self.verdicts
        z = NormalDist().inv_cdf(confidence)
        ratio = quantile(ratios, confidence) if ratios else 1.0
        if len(ratios) < FEW_PEAKS:
            ratio = max(ratio, 1 + verdicts.location + z * verdicts.scale)
        return max(1.0, 1 + hypot(ratio - 1, z * self.widening))


def margins_of(likeness: Likeness) -> Margins:
    """Return the distribution for a job: its kind's, widened by departures. Raises DataFileError."""
    published = load_residuals()
    own = published.kinds[likeness.kind]
    spread = published.widest if likeness.unlike else own.verdicts
    widening = published.between * sqrt(len(likeness.departures) + bool(likeness.unlike))
    if likeness.unlike:
        own = replace(own, peak_ratios=())
    elif likeness.kind in (RunKind.BENCHMARK, RunKind.BENCHMARK_LAST):
        own = replace(own, peak_ratios=published.kinds[RunKind.CONVOLUTIONS].peak_ratios)
    return Margins(replace(spread, scale=hypot(spread.scale, widening)), own, widening)


def likeness_of(job: Job, trace: Trace, capability: tuple[int, int]) -> Likeness:
    """Return the published runs that a job is like, by its options, its operators and its parameters."""
    sites = Counter(site.op for site in trace.sites)
    lengths, padded = lengths_of(job, trace)
    kind = kind_of(job, trace)
    departures = tuple(_departures(job, trace, sites, kind, lengths, capability))
    return Likeness(kind, lengths, padded, departures, tuple(_unlike(job, trace, sites, kind)))


def kind_of(job: Job, trace: Trace) -> RunKind:
    """Return the kind of published runs that is nearest to a job."""
    sites = Counter(site.op for site in trace.sites)
    is_plain = job.precision is Precision.FP32 and not job.cudnn_benchmark
    if sites[CONVOLUTION] > FEW_CONVOLUTIONS:
        if is_plain:
            return RunKind.CONVOLUTIONS
        is_last = job.memory_format is MemoryFormat.CHANNELS_LAST
        return RunKind.BENCHMARK_LAST if is_last else RunKind.BENCHMARK
    if _is_large(job, trace):
        return RunKind.LARGE
    if lengths_of(job, trace)[0] is Lengths.VARYING:
        return RunKind.TEXTS
    return RunKind.CONVOLUTIONS if is_plain and not _attends(sites) else RunKind.ATTENTION


def kind_without_trace(job: Job) -> RunKind:
    """Return the kind as far as options determine it: texts where an input is a sequence of integers."""
    if job.lengths is not None:
        return RunKind.TEXTS if job.lengths is Lengths.VARYING else RunKind.CONVOLUTIONS
    has_tokens = any(len(spec.shape) == 1 and _is_integer(spec) for spec in job.inputs)
    return RunKind.TEXTS if has_tokens else RunKind.CONVOLUTIONS


def lengths_of(job: Job, trace: Trace) -> tuple[Lengths, str]:
    """Return whether real samples differ in size, and the input that shows it unless the user does.

    Token ids have one dimension and are looked up in an embedding, or are named as tokenizers name them.
    Integer labels and class maps are neither.
    """
    if job.lengths is not None:
        return job.lengths, ""
    has_embedding = any("embedding" in site.op for site in trace.sites)
    for spec in job.inputs:
        name = (spec.keyword or "").rpartition(".")[2]  # of an entry of a nested input
        if len(spec.shape) == 1 and (name in _PADDED or (has_embedding and _is_integer(spec))):
            return Lengths.VARYING, str(spec)
    return Lengths.FIXED, ""


def _is_integer(spec: TensorSpec) -> bool:
    return spec.dtype.startswith("int")


def _is_large(job: Job, trace: Trace) -> bool:
    owned = (
        event for event in trace.events if isinstance(event, Alloc) and event.category is Category.PARAMETER
    )
    element = 2 if job.precision in _HALF else 4
    return sum(event.size_bytes for event in owned) >= LARGE_PARAMETERS * element


def _attends(sites: Counter[str]) -> bool:
    return any(_FUSED_ATTENTION in op for op in sites) or all(sites[op] for op in _UNFUSED_ATTENTION)


def _unlike(job: Job, trace: Trace, sites: Counter[str], kind: RunKind) -> Iterator[str]:
    """Yield the job's features that no published run has, as ends of a sentence."""
    ranks = {len(spec.shape) for spec in job.inputs if not _is_integer(spec)}
    many = sites[CONVOLUTION] > FEW_CONVOLUTIONS
    if sites[CONVOLUTION] and 4 in ranks:
        yield "has three-dimensional convolutions"
    if many and ranks and max(ranks) < 3:
        yield "has convolutions over sequences"
    if many and _attends(sites) and kind is RunKind.CONVOLUTIONS:
        yield "has both attention and many convolutions in these settings"
    if any(word in op for op in sites for word in _RECURRENT):
        yield "has recurrent layers"
    if any(word in op for op in sites for word in _DETECTION) or trace.has_random_sizes:
        yield "has tensors whose sizes depend on values, as detectors do"
    if job.mode is Mode.GENERATE:
        yield "generates"
    if job.ddp and job.mode is Mode.TRAIN:
        yield "trains with DistributedDataParallel"


def _departures(
    job: Job, trace: Trace, sites: Counter[str], kind: RunKind, lengths: Lengths, capability: tuple[int, int]
) -> Iterator[str]:
    """Yield the job's features that no run of the kind has, as ends of a sentence."""
    settings = load_residuals().kinds[kind].settings
    if job.precision.value not in settings.precisions:
        yield f"in {job.precision.value}"
    if sites[CONVOLUTION] and job.cudnn_benchmark not in settings.cudnn_benchmark:
        yield f"with cudnn.benchmark {'on' if job.cudnn_benchmark else 'off'}"
    if sites[CONVOLUTION] and job.memory_format.value not in settings.memory_formats:
        yield f"in {job.memory_format.value}"
    if capability not in settings.capabilities:
        yield f"on compute capability {capability[0]}.{capability[1]}"
    if job.mode in (Mode.INFER, Mode.FORWARD):
        yield "without a backward pass"
    if lengths is Lengths.VARYING and kind not in (RunKind.TEXTS, RunKind.LARGE):
        yield "with samples of varying lengths"
    if any("convolution" not in op for op in trace.unknown_ops):
        yield "with operators whose scratch memory is not known"
