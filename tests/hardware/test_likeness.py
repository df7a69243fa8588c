"""Published runs that a job is like: the certainty of its answer."""

import json
from math import hypot

import pytest
import torch
from torch import nn

import planner
from planner.api.integrations.live_model import LiveLoop, plan_live_model
from planner.hardware.likeness import Departure, Likeness, kind_of, lengths_of, likeness_of, margins_of
from planner.hardware.residuals import Doubt, RunKind, load_residuals
from planner.jobs import Job, Lengths, MemoryFormat, Mode, Precision, TensorSpec
from planner.jobs.codec import job_from_json, job_to_json
from planner.program.events import Trace
from planner.program.kernels.convolution import ConvWorkspaceSource, WorkspaceAccount
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
BORROWED = "with workspaces borrowed from much larger or smaller ones"


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
    assert result.plan.budget.likeness.lengths is Lengths.FIXED
    assert result.plan.budget.likeness.kind is RunKind.FIXED
    maps = Job.create("m", inputs=(IMAGE, TensorSpec((16, 16), "int64")))
    assert lengths_of(maps, Trace((), (), 1)) == (Lengths.FIXED, "")


def test_tokens_are_texts_of_varying_lengths() -> None:
    """Token ids are known by the embedding that takes them or by their name, and users may override it."""
    assert likeness(Tagger, TOKENS).lengths is Lengths.VARYING
    assert likeness(Tagger, TOKENS).kind is RunKind.TEXTS
    fixed = likeness(Tagger, TOKENS, lengths="fixed")
    assert (fixed.kind, fixed.lengths, fixed.padded) == (RunKind.FIXED, Lengths.FIXED, "")
    audio = Job.create("m", inputs=(TensorSpec((16_000,)), TensorSpec((100,), "int64", "attention_mask")))
    nested = Job.create("m", inputs=(TensorSpec((100,), "int64", "batch.input_ids"),))
    for job in (audio, nested):
        assert lengths_of(job, Trace((), (), 1))[0] is Lengths.VARYING


def test_padded_audio_is_as_the_user_says() -> None:
    """Floats of varying length look like those of a fixed one; the option states what they are."""
    plain = likeness(Tagger, TOKENS, lengths="fixed")
    assert plain.departures == ()
    answer = likeness(Classifier, IMAGE, lengths="varying", cudnn="published")
    assert answer.departures == (Departure("with samples of varying lengths"),)


def test_lengths_change_margins_and_no_trace() -> None:
    """Jobs that differ in their lengths alone share cached traces, and survive their JSON."""
    job = Job.create("torchvision:resnet18", inputs=(IMAGE,), target=LABEL)
    varying = job.replace(lengths=Lengths.VARYING)
    assert fingerprint_of(job) == fingerprint_of(varying)
    assert job_from_json(json.loads(json.dumps(job_to_json(varying)))) == varying
    assert (
        job_from_json({name: value for name, value in job_to_json(job).items() if name != "lengths"}) == job
    )


@pytest.mark.parametrize(
    ("changes", "unlike"),
    [
        ({"fsdp": 2}, "is sharded over several GPUs"),
    ],
)
def test_no_probability_where_no_run_is_like_the_job(changes: dict[str, object], unlike: str) -> None:
    """The probability is null, the text states why, and the margins are the widest."""
    result = planner.estimate(
        Classifier, 2, input=IMAGE, target=LABEL, gpu="RTX 3060", no_calibration=True, **changes
    )
    answer = result.to_dict()
    assert answer["p_out_of_memory"] is None
    assert answer["risk"]["unlike"] == [unlike]
    assert unlike in " ".join(str(result).split())
    assert answer["risk"]["scale"] > max(one.verdicts.scale for one in load_residuals().kinds.values())


def test_ddp_adds_the_range_of_nccl_and_no_other_margin() -> None:
    """Buckets are exact and NCCL's memory is a range of its own: the replay's margin is that of one GPU."""
    plain, ddp = (
        planner.estimate(
            *(Tagger, 2),
            **{"input": TOKENS, "target": LABEL, "lengths": "fixed", "gpu": "V100 32GB"},
            **{"no_calibration": True, "ddp": ddp},
        ).to_dict()
        for ddp in (False, True)
    )
    assert ddp["risk"] == plain["risk"]
    assert ddp["p_out_of_memory"] is not None
    assert ddp["device"]["nccl"]["spread_mib"] > 0
    taken = plain["device"]["allocator"]["capacity_mib"] - ddp["device"]["allocator"]["capacity_mib"]
    high_mib = 716
    assert ddp["device"]["nccl"]["mib"] < taken < 1.2 * high_mib


@pytest.mark.parametrize(
    ("build", "spec", "departure"),
    [
        (Volumes, TensorSpec((1, 8, 8, 8)), "with three-dimensional convolutions"),
        (Recurrent, TOKENS, "with recurrent layers"),
    ],
)
def test_what_emulated_runs_alone_show_widens(
    build: type[nn.Module], spec: TensorSpec, departure: str
) -> None:
    """Layers that no measured run has are named, and widen the margins."""
    result = planner.estimate(build, 2, input=spec, target=LABEL, gpu="RTX 3060", no_calibration=True)
    likeness = result.estimate.budget.likeness
    assert Departure(departure) in likeness.departures
    alone = replace(likeness, departures=())
    assert margins_of(likeness).verdicts.scale > margins_of(alone).verdicts.scale
    assert departure in " ".join(str(result).split())


def test_departures_widen_and_are_named() -> None:
    """Each departure adds the deviation of its doubt, in quadrature, and an answer names it."""
    doubts = load_residuals().doubts
    plain = margins_of(Likeness()).verdicts
    several = (Departure("in bf16"), Departure("on a Mars"), Departure("with answers", Doubt.STORED))
    wide = margins_of(Likeness(departures=several))
    assert wide.verdicts.location == plain.location
    widening = 2 * doubts[Doubt.SETTING].scale ** 2 + doubts[Doubt.STORED].scale ** 2
    assert wide.verdicts.scale**2 == pytest.approx(plain.scale**2 + widening)
    options = {"input": IMAGE, "target": LABEL, "gpu": "H100 80GB", "no_calibration": True}
    answer = planner.estimate(Classifier, 2, cudnn="published", **options)
    setting = doubts[Doubt.SETTING].scale
    assert f"in addition {setting:.1%} on compute capability 9.0" in " ".join(str(answer).split())
    parts = answer.to_dict()["risk"]["parts"]
    assert [part["what"] for part in parts] == ["convolutions", "on compute capability 9.0"]
    assert sum(part["scale"] ** 2 for part in parts) ** 0.5 == pytest.approx(
        answer.to_dict()["risk"]["scale"], abs=1e-5
    )


FITTED, LIBRARY = ConvWorkspaceSource.PUBLISHED, ConvWorkspaceSource.LIBRARY
AMP = {"precision": Precision.AMP_FP16}
TIMM = {"cudnn_benchmark": True, **AMP}


@pytest.mark.parametrize(
    ("changes", "source", "kind", "departures"),
    [
        ({}, FITTED, RunKind.CONVOLUTIONS, []),
        (TIMM, FITTED, RunKind.BENCHMARK, []),
        (TIMM, LIBRARY, RunKind.BENCHMARK, []),
        ({**TIMM, "memory_format": MemoryFormat.CHANNELS_LAST}, FITTED, RunKind.BENCHMARK_LAST, []),
        (AMP, FITTED, RunKind.BENCHMARK, ["with cudnn.benchmark off"]),
        ({"memory_format": MemoryFormat.CHANNELS_LAST}, FITTED, RunKind.CONVOLUTIONS, ["in channels_last"]),
        ({"mode": Mode.INFER}, FITTED, RunKind.CONVOLUTIONS, ["without a backward pass"]),
        (AMP, LIBRARY, RunKind.FIXED, []),
        ({}, ConvWorkspaceSource.UNCOUNTED, RunKind.FIXED, []),
        (TIMM, ConvWorkspaceSource.UNCOUNTED, RunKind.BENCHMARK, []),
        ({}, LIBRARY, RunKind.FIXED, []),
        ({}, ConvWorkspaceSource.STORED, RunKind.FIXED, ["with stored answers for convolutions"]),
        ({}, ConvWorkspaceSource.SIMILAR, RunKind.FIXED, ["with stored answers for similar convolutions"]),
        (
            {"torch": "2.9"},
            ConvWorkspaceSource.STORED,
            RunKind.FIXED,
            ["with stored answers for convolutions", "with torch 2.9, whose cuDNN is another"],
        ),
    ],
)
def test_kinds_of_convolutions(
    changes: dict[str, object], source: ConvWorkspaceSource, kind: RunKind, departures: list[str]
) -> None:
    """What answers for convolutions decides whether a job is like an emulated run or like published CNNs, and
    of these precision, cudnn.benchmark and memory format which.
    """
    from planner.program.events import Site

    sites = tuple(Site(f"layer{number}", "aten.convolution.default") for number in range(5))
    trace = Trace((), sites, 1, conv_account=WorkspaceAccount(source))
    job = Job.create("m", inputs=(IMAGE,)).replace(**changes)  # type: ignore[arg-type]
    assert kind_of(job, trace) is kind
    assert [one.what for one in likeness_of(job, trace, AMPERE).departures] == departures
    elsewhere = [one.what for one in likeness_of(job, trace, HOPPER).departures]
    other = [] if kind is RunKind.FIXED else ["on compute capability 9.0"]
    assert sorted(elsewhere) == sorted([*departures, *other])


@pytest.mark.parametrize("count", [1, 5], ids=["few convolutions", "many"])
@pytest.mark.parametrize(
    ("doubt", "share", "counted", "words"),
    [
        (Doubt.UNCOUNTED, 1.0, 1.0, "with no workspace known for 100% of its convolutions"),
        (Doubt.UNCOUNTED, 0.4, 0.4, "with no workspace known for 40% of its convolutions"),
        (Doubt.FAR, 1.0, 1.0, f"{BORROWED} for 100% of its convolutions"),
        (Doubt.FAR, 0.5, 1.0, f"{BORROWED} for 50% of its convolutions"),
        (Doubt.FAR, 0.2, 0.4, f"{BORROWED} for 20% of its convolutions"),
    ],
)
def test_convolutions_without_a_workspace_of_their_own_widen_in_proportion(
    count: int, doubt: Doubt, share: float, counted: float, words: str
) -> None:
    """To their share of all convolutions, however many there are, as long as convolutions allocate as much of
    what layers do as in the networks that show it: here half of that, parameters and scratch memory left out.
    In those that show the doubt about far ones, they are most.
    """
    from planner.program.events import Alloc, Category, Site

    sites = (
        *(Site(f"layer{number}", "aten.convolution.default") for number in range(count)),
        Site("x", "relu"),
    )
    sizes = ((0, 28, Category.ACTIVATION), (count, 972, Category.TEMPORARY))
    aside = ((0, 900, Category.PARAMETER), (0, 900, Category.WORKSPACE))
    events = tuple(
        Alloc(block, size_bytes, category, site)
        for block, (site, size_bytes, category) in enumerate((*sizes, *aside), 1)
    )
    source, shares = ConvWorkspaceSource.STORED, (share, 0.0) if doubt is Doubt.UNCOUNTED else (0.0, share)
    trace = Trace(events, sites, 1, conv_account=WorkspaceAccount(source, *shares))
    likeness = likeness_of(Job.create("m", inputs=(IMAGE,)), trace, AMPERE)
    departure = next(one for one in likeness.departures if one.doubt is doubt)
    assert departure.what == words
    assert departure.weight == pytest.approx(0.5 * counted)
    spread, margins = load_residuals().doubts[doubt], margins_of(likeness)
    (part,) = (part for part in margins.parts if part.what == departure.what)
    assert (part.scale, part.peak_scale) == pytest.approx(
        (0.5 * counted * spread.scale, 0.5 * counted * spread.peak_scale)
    )
    exact = replace(trace, conv_account=WorkspaceAccount(source))
    known = margins_of(likeness_of(Job.create("m", inputs=(IMAGE,)), exact, AMPERE))
    assert margins.verdicts.scale == pytest.approx(hypot(known.verdicts.scale, part.scale))
    assert margins.peak_ratio(0.99) > known.peak_ratio(0.99) > 1


def test_a_few_volumes_that_borrow_their_workspaces_widen_too() -> None:
    """Even a single three-dimensional convolution widens the margin, since it is large."""
    from planner.program.events import Alloc, Category, Site

    volume = TensorSpec((3, 8, 32, 32))
    trace = Trace(
        (Alloc(1, 100, Category.TEMPORARY, 0),),
        (Site("layer", "aten.convolution.default"),),
        1,
        conv_account=WorkspaceAccount(ConvWorkspaceSource.SIMILAR),
    )
    departures = likeness_of(Job.create("m", inputs=(volume,)), trace, AMPERE).departures
    assert [(one.doubt, one.weight) for one in departures] == [(Doubt.VOLUMES, 1), (Doubt.SETTING, 1)]
    assert not likeness_of(Job.create("m", inputs=(IMAGE,)), trace, AMPERE).departures


def test_images_of_a_sequence_are_no_volume() -> None:
    """A sequence of images has four dimensions, as a volume has, but its convolutions have two extents."""
    from planner.program import Convolution, Direction, Site

    sites = (Site("layer", "aten.convolution.default"),)
    sizes = {"x": (8, 3, 32, 32), "w": (8, 3, 3, 3), "y": (8, 8, 30, 30), "channels_last": False}
    steps = {"padding": (0, 0), "stride": (1, 1), "dilation": (1, 1)}
    convolution = Convolution(Direction.FORWARD, "float32", **sizes, **steps)
    job = Job.create("m", inputs=(TensorSpec((4, 3, 32, 32)),))
    assert not likeness_of(job, Trace((), sites, 2, convolutions={1: convolution}), AMPERE).departures
    assert likeness_of(job, Trace((), sites, 2), AMPERE).departures
