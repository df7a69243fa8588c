"""Published runs that a job is like: the certainty of its answer."""

import json

import pytest
import torch
from torch import nn

import planner
from planner.api.integrations._live_model import LiveLoop, plan_live_model
from planner.hardware.likeness import Likeness, kind_of, lengths_of, likeness_of, margins_of
from planner.hardware.residuals import RunKind, load_residuals
from planner.jobs import Job, Lengths, MemoryFormat, Mode, Precision, TensorSpec
from planner.jobs.codec import job_from_json, job_to_json
from planner.program.events import Trace
from planner.store.fingerprint import fingerprint_of
from tests.helpers.structs import replace

AMPERE, HOPPER = (8, 6), (9, 0)


class Classifier(nn.Module):
    """A CNN of six convolutions."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Conv2d(3 if not n else 8, 8, 3, padding=1), nn.ReLU()) for n in range(6)]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Tagger(nn.Module):
    """Tokens through an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(100, 16), nn.Linear(16, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).mean(1)


class Volumes(nn.Module):
    """A three-dimensional CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv3d(1, 4, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Recurrent(nn.Module):
    """An LSTM over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells, self.head = (
            nn.Embedding(100, 16),
            nn.LSTM(16, 16, batch_first=True),
            nn.Linear(16, 10),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.table(ids))[0][:, -1])


IMAGE, TOKENS = TensorSpec((3, 16, 16)), TensorSpec((12,), "int64")
LABEL = TensorSpec((), "int64")


def likeness(build: type[nn.Module], *inputs: TensorSpec, **changes: object) -> Likeness:
    """Return the likeness of a model on a GPU of compute capability 8.6."""
    result = planner.estimate(
        build, 2, input=list(inputs), target=LABEL, gpu="RTX 3060", no_calibration=True, **changes
    )
    return result.estimate.budget.likeness


def test_integer_labels_do_not_make_texts_of_images() -> None:
    """A live CNN whose batch holds integer labels, and integer class maps, is judged by the runs of CNNs."""

    def step(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    sample = (torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.int64))
    result = plan_live_model(LiveLoop(Classifier(), sample, step, {}), {"gpu": "RTX 3060"})
    assert result.plan.budget.likeness == Likeness(RunKind.CONVOLUTIONS)
    maps = Job("m", inputs=(IMAGE, TensorSpec((16, 16), "int64")))
    assert lengths_of(maps, Trace((), (), 1)) == (Lengths.FIXED, "")


def test_tokens_are_texts_of_varying_lengths() -> None:
    """Token ids are known by the embedding that takes them or by their name, and users may override it."""
    assert likeness(Tagger, TOKENS).lengths is Lengths.VARYING
    assert likeness(Tagger, TOKENS).kind is RunKind.TEXTS
    fixed = likeness(Tagger, TOKENS, lengths="fixed")
    assert (fixed.kind, fixed.lengths, fixed.padded) == (RunKind.CONVOLUTIONS, Lengths.FIXED, "")
    audio = Job("m", inputs=(TensorSpec((16_000,)), TensorSpec((100,), "int64", "attention_mask")))
    nested = Job("m", inputs=(TensorSpec((100,), "int64", "batch.input_ids"),))
    for job in (audio, nested):
        assert lengths_of(job, Trace((), (), 1))[0] is Lengths.VARYING


def test_padded_audio_is_as_the_user_says() -> None:
    """Floats of varying length look like those of a fixed one; the option states what they are."""
    assert likeness(Classifier, IMAGE).departures == ()
    answer = likeness(Classifier, IMAGE, lengths="varying")
    assert answer.departures == ("with samples of varying lengths",)


def test_lengths_change_margins_and_no_trace() -> None:
    """Jobs that differ in their lengths alone share cached traces, and survive their JSON."""
    job = Job("torchvision:resnet18", inputs=(IMAGE,), target=LABEL)
    varying = replace(job, lengths=Lengths.VARYING)
    assert fingerprint_of(job) == fingerprint_of(varying)
    assert job_from_json(json.loads(json.dumps(job_to_json(varying)))) == varying
    assert (
        job_from_json({name: value for name, value in job_to_json(job).items() if name != "lengths"}) == job
    )


@pytest.mark.parametrize(
    ("build", "spec", "changes", "unlike"),
    [
        (Volumes, TensorSpec((1, 8, 8, 8)), {}, "has three-dimensional convolutions"),
        (Recurrent, TOKENS, {}, "has recurrent layers"),
        (Classifier, IMAGE, {"ddp": True}, "trains with DistributedDataParallel"),
    ],
)
def test_no_probability_where_no_published_run_is_like_the_job(
    build: type[nn.Module], spec: TensorSpec, changes: dict[str, object], unlike: str
) -> None:
    """The probability is null, the text states why, and the margins are the widest."""
    result = planner.estimate(
        build, 2, input=spec, target=LABEL, gpu="RTX 3060", no_calibration=True, **changes
    )
    answer = result.to_dict()
    assert answer["p_out_of_memory"] is None
    assert answer["risk"]["unlike"] == [unlike]
    assert unlike in " ".join(str(result).split())
    assert answer["risk"]["scale"] > max(one.verdicts.scale for one in load_residuals().kinds.values())


def test_departures_widen_and_are_named() -> None:
    """Each setting that no run of the kind had adds the deviation between kinds, in quadrature."""
    published = load_residuals()
    plain = margins_of(Likeness()).verdicts
    wide = margins_of(Likeness(departures=("in bf16", "on compute capability 9.0"))).verdicts
    assert wide.location == plain.location
    assert wide.scale**2 == pytest.approx(plain.scale**2 + 2 * published.between**2)
    answer = str(
        planner.estimate(Classifier, 2, input=IMAGE, target=LABEL, gpu="H100 80GB", no_calibration=True)
    )
    assert "none of these runs is on compute capability 9.0" in " ".join(answer.split())


@pytest.mark.parametrize(
    ("changes", "kind", "departures"),
    [
        ({}, RunKind.CONVOLUTIONS, ()),
        ({"cudnn_benchmark": True, "precision": Precision.AMP_FP16}, RunKind.BENCHMARK, ()),
        (
            {
                "cudnn_benchmark": True,
                "precision": Precision.AMP_FP16,
                "memory_format": MemoryFormat.CHANNELS_LAST,
            },
            RunKind.BENCHMARK_LAST,
            (),
        ),
        ({"precision": Precision.AMP_FP16}, RunKind.BENCHMARK, ("with cudnn.benchmark off",)),
        ({"memory_format": MemoryFormat.CHANNELS_LAST}, RunKind.CONVOLUTIONS, ("in channels_last",)),
        ({"mode": Mode.INFER}, RunKind.CONVOLUTIONS, ("without a backward pass",)),
    ],
)
def test_kinds_of_convolutions(
    changes: dict[str, object], kind: RunKind, departures: tuple[str, ...]
) -> None:
    """Precision, cudnn.benchmark and memory format decide which published CNNs are like a job."""
    from planner.program.events import Site

    sites = tuple(Site(f"layer{number}", "aten.convolution.default") for number in range(5))
    trace = Trace((), sites, 1)
    job = replace(Job("m", inputs=(IMAGE,)), **changes)  # type: ignore[arg-type]
    assert kind_of(job, trace) is kind
    assert likeness_of(job, trace, AMPERE).departures == departures
    assert likeness_of(job, trace, HOPPER).departures[-1:] != ()
