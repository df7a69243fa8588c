"""Precision, gradient scaling and memory format of a job, in its model, its batches and its loop."""

import pytest
import torch
from torch import Tensor, nn

from calibration.probe.run import host_batch
from planner.capture.cuda.operators.semantics import cuda_semantics
from planner.capture.loop.batches import empty_batch
from planner.capture.loop.precision import (
    MetaScaler,
    convert_inputs,
    convert_model,
    cuda_runtime,
    format_of,
    meta_runtime,
)
from planner.jobs import (
    Job,
    Loss,
    MemoryFormat,
    Mode,
    Optimizer,
    OptimizerImpl,
    Precision,
    parse_tensor_spec,
)
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Trace
from planner.report.assumptions import run_assumptions
from tests.helpers.models import AMPERE, job_of, trace_of
from tests.report.test_text import budget, estimated

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


class Mixed(nn.Module):
    """Weights of 1 to 5 dimensions, and a buffer of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.Conv2d(3, 4, 3)
        self.space = nn.Conv3d(3, 4, 3)
        self.flat = nn.Linear(4, 2)
        self.counter: Tensor
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))


# ---- the model


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.FP32, torch.float32),
        (Precision.AMP_FP16, torch.float32),
        (Precision.AMP_BF16, torch.float32),
        (Precision.FP16, torch.float16),
        (Precision.BF16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_pure_precisions_convert_the_model_and_autocast_does_not(
    precision: Precision, dtype: torch.dtype, device: str
) -> None:
    """All floating-point parameters change their type, whole numbers do not."""
    model = Mixed().to(device)
    assert convert_model(model, job_of("4", precision=precision)) is model
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.counter.dtype is torch.int64


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_channels_last_concerns_weights_of_4_and_5_dimensions(device: str) -> None:
    """The channels become the fastest dimension of convolutions, and nothing else changes."""
    model = Mixed().to(device)
    before = list(model.parameters())
    assert convert_model(model, job_of("4", memory_format=MemoryFormat.CHANNELS_LAST)) is model
    assert model.plane.weight.stride() == (27, 1, 9, 3)
    assert model.space.weight.stride() == (81, 1, 27, 9, 3)
    assert model.flat.weight.stride() == (4, 1)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


def test_a_kernel_of_one_pixel_changes_its_strides_too() -> None:
    """`Module.to` gives a 1 x 1 kernel the strides of channels last, though both formats fit it."""
    model = nn.Conv2d(3, 4, 1, device="meta")
    job = job_of("3x2x2", memory_format=MemoryFormat.CHANNELS_LAST)
    expected = nn.Conv2d(3, 4, 1, device="meta").to(memory_format=LAST).weight.stride()  # type: ignore[call-overload]
    convert_model(model, job)
    assert model.weight.stride() == expected == (3, 1, 3, 3)


# ---- the batch


def test_floats_without_a_type_of_their_own_follow_the_model() -> None:
    """float32, the type of a spec that names none, becomes the model's; others are what they are."""
    job = job_of("3x4x4", "5:float64", "ids=7:int64", target=parse_tensor_spec("2"), precision=Precision.BF16)
    typed = convert_inputs(job)
    assert [str(spec) for spec in typed.samples.inputs] == ["3x4x4:bfloat16", "5:float64", "ids=7:int64"]
    assert str(typed.samples.target) == "2:bfloat16"
    for precision in (Precision.FP32, Precision.AMP_FP16, Precision.AMP_BF16):
        plain = job_of("3x4x4", precision=precision)
        assert convert_inputs(plain) == plain


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((2, 3, 4, 4), torch.float16, LAST),
        ((2, 3, 4, 4, 4), torch.float32, LAST_3D),
        ((2, 3, 4), torch.float32, torch.contiguous_format),
        ((2, 3, 4, 4), torch.int64, torch.contiguous_format),
        ((2,), torch.float32, torch.contiguous_format),
    ],
)
def test_channels_last_is_for_images_and_volumes(
    shape: tuple[int, ...], dtype: torch.dtype, expected: torch.memory_format
) -> None:
    """Floating-point tensors of 4 and 5 dimensions; without the option none."""
    assert format_of(job_of("3", memory_format=MemoryFormat.CHANNELS_LAST), shape, dtype) is expected
    assert format_of(job_of("3"), shape, dtype) is torch.contiguous_format


def test_the_traced_batch_is_like_the_one_of_a_calibration() -> None:
    """Types, shapes and strides on meta are those of the batch that a GPU would be fed."""
    job = convert_inputs(
        job_of(
            "3x4x5",
            "vol=2x3x4x5",
            "ids=7:int64",
            target=parse_tensor_spec("2x3x4"),
            mode=Mode.TRAIN,
            precision=Precision.FP16,
            memory_format=MemoryFormat.CHANNELS_LAST,
        )
    )
    (image,), named, target = empty_batch(job, 6, "meta")
    (real_image,), real_named, real_target = host_batch(job, 6)
    assert target is not None
    assert real_target is not None
    for ours, real in (
        (image, real_image), (named["vol"], real_named["vol"]), (named["ids"], real_named["ids"]),
        (target, real_target),
    ):  # fmt: skip
        assert (ours.shape, ours.dtype, ours.stride()) == (real.shape, real.dtype, real.stride())
    assert image.stride() == (60, 1, 15, 3)
    assert named["vol"].stride() == (120, 1, 40, 10, 2)


# ---- the machine


def test_machines_open_regions_for_mixed_precision_only() -> None:
    """Machines on meta and on a GPU open the region alike; the type is the job's."""
    for precision, dtype in ((Precision.AMP_FP16, torch.float16), (Precision.AMP_BF16, torch.bfloat16)):
        with cuda_semantics(AMPERE):  # where `torch.autocast("cuda")` works without a GPU
            for machine in (meta_runtime, cuda_runtime):
                with machine(job_of("3", precision=precision)).autocast():
                    assert torch.is_autocast_enabled("cuda")
                    assert torch.get_autocast_dtype("cuda") is dtype
                assert not torch.is_autocast_enabled("cuda")
    for precision in (Precision.FP32, Precision.FP16, Precision.BF16):
        with meta_runtime(job_of("3", precision=precision)).autocast():
            assert not torch.is_autocast_enabled("cuda")


def test_scalers_are_made_where_the_job_has_one() -> None:
    """torch's own on a GPU, its double on meta, none otherwise."""
    scaled = job_of("3", precision=Precision.AMP_FP16, grad_scaler=True)
    assert isinstance(meta_runtime(scaled).scaler, MetaScaler)
    with cuda_semantics(AMPERE):  # where it takes a GPU for available
        scaler = cuda_runtime(scaled).scaler
    assert type(scaler) is torch.amp.GradScaler
    assert scaler.is_enabled()
    assert meta_runtime(job_of("3")).scaler is None
    assert cuda_runtime(job_of("3")).scaler is None


# ---- gradient scaling


def scaled_job(**fields: object) -> Job:
    options: dict[str, object] = {
        "precision": Precision.AMP_FP16,
        "grad_scaler": True,
        "optimizer": Optimizer.MOMENTUM,
    }
    return job_of("10", mode=Mode.TRAIN, **{**options, **fields})


def outside_of_modules(taken: Trace, phase: Phase, step: int) -> list[tuple[str, int]]:
    """Operator and bytes of the blocks that the loop itself allocates in this phase."""
    now = (0, Phase.SETUP)
    sizes = []
    for event in taken.events:
        if isinstance(event, PhaseStart):
            now = (event.step, event.phase)
        elif isinstance(event, Alloc) and now == (step, phase) and event.category is not Category.WORKSPACE:
            site = taken.sites[event.site]
            if site.module == "":
                name = site.op.removeprefix("aten.").removesuffix(".default")
                sizes.append((name, event.size_bytes))
    return sizes


def test_scaling_takes_a_few_numbers() -> None:
    """unscale_: the inverse of the scale by way of doubles, and the flag; gradients change in place.

    Momentum's copies of the gradients show that the first step is taken.
    """
    taken = trace_of(lambda: nn.Linear(10, 7), scaled_job(steps=2), 3)
    scaler = [("_to_copy", 8), ("reciprocal", 8), ("_to_copy", 4), ("full", 4)]
    scaler += [("_to_copy", 4)] * 2  # each goes to the gradients' device as a copy, even to its own
    assert outside_of_modules(taken, Phase.OPTIMIZER, 1) == [*scaler, ("clone", 280), ("clone", 28)]
    assert outside_of_modules(taken, Phase.OPTIMIZER, 2) == scaler
    assert not [op for op in taken.unknown_ops if "amp" in op]


def test_the_scale_is_made_once() -> None:
    """The scale and the growth tracker are filled in the first step and live on; the product of scale and
    loss is made in each.
    """
    taken = trace_of(lambda: nn.Linear(10, 7), scaled_job(steps=2), 3)
    first = outside_of_modules(taken, Phase.BACKWARD, 1)[:3]
    assert first == [("full", 4), ("full", 4), ("mul.Tensor", 4)]
    assert outside_of_modules(taken, Phase.BACKWARD, 2)[0] == ("mul.Tensor", 4)
    numbers = [
        e.block
        for e in taken.events
        if isinstance(e, Alloc) and taken.sites[e.site].op.startswith("aten.full")
    ]
    assert not {e.block for e in taken.events if isinstance(e, Free)} & set(numbers[:2])


def test_fused_optimizers_unscale_in_their_kernel() -> None:
    """The scaler hands them the scale and the flag and they take the step (torch/amp/grad_scaler.py)."""
    taken = trace_of(lambda: nn.Linear(10, 7), scaled_job(optimizer_impl=OptimizerImpl.FUSED), 3)
    made = [size for _, size in outside_of_modules(taken, Phase.OPTIMIZER, 1)]
    assert made.count(280) == 1  # the momentum of the weight, and no unscaled gradient


# ---- whole jobs


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("memory_format", list(MemoryFormat))
def test_what_autograd_keeps(precision: Precision, memory_format: MemoryFormat) -> None:
    """The blocks of the forward pass that wait for the backward pass, for a convolution, batch norm and ReLU.

    Under autocast those are also the casts of the input and of the weights; the cast of the bias is gone with
    the region. The result of batch norm is gone as soon as ReLU, which keeps its own, has read it.
    """
    build = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1)
    )
    job = job_of("3x8x8", mode=Mode.TRAIN, precision=precision, memory_format=memory_format)
    taken = trace_of(build, job, 10)
    saved = [
        (taken.sites[e.site].module, taken.sites[e.site].op.split(".")[1], e.size_bytes)
        for e in taken.events
        if isinstance(e, Alloc) and e.category is Category.ACTIVATION
    ]
    mixed = precision in (Precision.AMP_FP16, Precision.AMP_BF16)
    size = 4 if precision is Precision.FP32 else 2
    assert saved == [
        *[("0", "_to_copy", 4 * 27 * 2), ("0", "_to_copy", 10 * 3 * 64 * 2)] * mixed,
        ("0", "convolution", 10 * 4 * 36 * size),
        *[("1", "native_batch_norm", 4 * 4)] * 2,  # mean and deviation, always in single precision
        ("2", "relu", 10 * 4 * 36 * size),
        *[("3", "_to_copy", 5 * 4 * 2)] * mixed,
        ("3", "convolution", 10 * 5 * 36 * size),  # the output, which its name holds
        ("", "sum", 4 if mixed else size),
    ]


def test_pure_half_precision_feeds_its_loss() -> None:
    """A target of floating point has the model's type, so that the loss is taken in it."""
    job = job_of(
        "10", mode=Mode.TRAIN, target=parse_tensor_spec("7"), loss=Loss.MSE, precision=Precision.BF16
    )
    taken = trace_of(lambda: nn.Linear(10, 7), job, 3)
    sizes = [e.size_bytes for e in taken.events if isinstance(e, Alloc) and e.category is Category.INPUT]
    assert sizes == [3 * 10 * 2, 3 * 7 * 2]


# ---- the answer


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "no autocast, tensors keep the types that the model gives them"),
        (
            {"precision": Precision.AMP_FP16, "grad_scaler": True},
            "CUDA's autocast to float16 up to the loss, weights stay in float32; "
            "the loss is scaled, no step is skipped",
        ),
        (
            {"precision": Precision.AMP_BF16, "backward_in_autocast": True},
            "CUDA's autocast to bfloat16 up to the backward pass, weights stay in float32",
        ),
        (
            {"precision": Precision.BF16, "memory_format": MemoryFormat.CHANNELS_LAST},
            "no autocast, the model and its float32 inputs and targets are in bfloat16; "
            "weights and inputs with 4 or 5 dimensions are in channels_last",
        ),
    ],
)
def test_the_answer_names_precision_and_layout(options: dict[str, object], sentence: str) -> None:
    """One of the assumptions states in which types and layout the job computes."""
    job = job_of("3", mode=Mode.TRAIN, **options)
    assert f"nothing else runs on the GPU; {sentence}" in run_assumptions(estimated(1, budget(None), job))
