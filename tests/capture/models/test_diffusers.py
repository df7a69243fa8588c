"""Models of diffusers are built from configurations alone, and are called as training scripts call them."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.capture.models.registry import build_model
from planner.capture.session import record
from planner.errors import ModelError, UsageError
from planner.jobs import Job, Loss, parse_tensor_spec, resolve_job
from planner.planning.programs import complete_from_library
from planner.program.events import Alloc, Category, Free, Trace
from planner.program.extrapolation.fit import fit_traces

AMPERE = (8, 6)
UNET = {
    "block_out_channels": (32, 32),
    "norm_num_groups": 8,
    "cross_attention_dim": 16,
    "sample_size": 16,
} | {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}


def diffusers_job(name: str, inputs: tuple[str, ...] = (), options: Any = (), **arguments: Any) -> Job:
    """The whole job of `diffusers:NAME` with these constructor arguments."""
    specs = [parse_tensor_spec(text) for text in inputs]
    job = resolve_job(
        f"diffusers:{name}", {}, model_args=list(arguments.items()), inputs=specs, **dict(options)
    )
    return complete_from_library(job)


def tensors_of(job: Job) -> list[str]:
    """The inputs as --input spells them, and the target."""
    return [*map(str, job.samples.inputs), f"-> {job.samples.target}"]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("UNet2DModel", {"sample_size": 32}, ["sample=3x32x32", "timestep=scalar:int64", "-> 3x32x32"]),
        (
            "UNet2DConditionModel",
            {"cross_attention_dim": 768},
            [
                "sample=4x64x64",
                "timestep=scalar:int64",
                "encoder_hidden_states=77x768",
                "-> 4x64x64",
            ],
        ),
        (
            "DiTTransformer2DModel",
            {"out_channels": 8},
            [
                "hidden_states=4x32x32",
                "timestep=scalar:int64",
                "class_labels=scalar:int64",
                "-> 8x32x32",
            ],
        ),
        (
            "FluxTransformer2DModel",
            {"guidance_embeds": True},
            [
                "hidden_states=4096x64",
                "encoder_hidden_states=512x4096",
                "pooled_projections=768",
                "timestep=scalar",
                "guidance=scalar",
                "-> 4096x64",
            ],
        ),
        ("AutoencoderKL", {"sample_size": 512}, ["sample=3x512x512", "-> 3x512x512"]),
    ],
)
def test_inputs_follow_from_the_configuration(
    name: str, arguments: dict[str, Any], expected: list[str]
) -> None:
    """Latents, noise steps, texts and targets have the sizes that the configuration implies."""
    assert tensors_of(diffusers_job(name, **arguments)) == expected


def test_stable_diffusion_xl_gets_pooled_texts_and_sizes() -> None:
    """A UNet with `text_time` embeddings is also given the pooled text and six numbers per image."""
    job = diffusers_job(
        "UNet2DConditionModel",
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    assert [str(spec) for spec in job.samples.inputs[3:]] == [
        "added_cond_kwargs.text_embeds=1280",
        "added_cond_kwargs.time_ids=6",
    ]


def test_the_image_of_a_controlnet_is_eight_times_its_latents() -> None:
    """The conditioning image comes at full resolution, and the residuals that it returns are summed."""
    job = diffusers_job("ControlNetModel", inputs=("sample=4x32x32",))
    assert str(job.samples.inputs[-1]) == "controlnet_cond=3x256x256"
    assert job.loop.loss is Loss.SUM


def test_a_unet_is_affine_in_the_batch() -> None:
    """Two runs of a small UNet fit to one program."""
    job = diffusers_job("UNet2DConditionModel", **UNET)
    first, second = (record(job, batch, AMPERE) for batch in (2, 3))
    assert fit_traces(first, second).events


def test_checkpointing_is_that_of_diffusers() -> None:
    """`--checkpoint blocks` turns on the model's own switch, and keeps fewer activations."""
    plain, checkpointed = (
        record(diffusers_job("UNet2DConditionModel", options=options, **UNET), 4, AMPERE)
        for options in ((), (("checkpoint", "blocks"),))
    )
    notes = " ".join(checkpointed.notes)
    assert "the model's own enable_gradient_checkpointing" in notes

    def held(trace: Any) -> int:
        return sum(
            event.size_bytes
            for event in trace.events
            if isinstance(event, Alloc) and event.category is Category.ACTIVATION
        )

    assert held(checkpointed) < held(plain)


def test_flux_gets_positions_without_a_batch_dimension() -> None:
    """A small Flux runs, with positions made on the GPU for each call."""
    job = diffusers_job(
        "FluxTransformer2DModel",
        inputs=("hidden_states=64x64", "encoder_hidden_states=16x32"),
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(8, 12, 12),
    )
    assert str(job.samples.target) == "64x64"
    trace = record(job, 2, AMPERE)
    zeros = [
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc) and trace.sites[event.site].op == "aten.zeros.default"
    ]
    assert zeros[:2] == [64 * 3 * 4, 16 * 3 * 4]


def test_a_folder_names_its_class(tmp_path: Path) -> None:
    """A folder's config.json gives class and values; keys that the constructor does not know are left out."""
    config = {"_class_name": "UNet2DModel", "_diffusers_version": "0.1", "block_out_channels": [32, 64]}
    config |= {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = diffusers_job(str(tmp_path), sample_size=8)
    assert tensors_of(job)[0] == "sample=3x8x8"
    assert type(build_model(job)).__name__ == "UNet2DModel"


@pytest.mark.parametrize(("switch", "size"), [("enable_slicing", 32), ("enable_tiling", 64)])
def test_an_autoencoder_may_take_its_images_in_parts(switch: str, size: int) -> None:
    """One image at a time, or tiles of 32 pixels for images of 64, take less than the whole at once."""
    small = {"block_out_channels": (16,), "norm_num_groups": 4, "sample_size": 32, "latent_channels": 2}
    inputs, infer = (f"sample=3x{size}x{size}",), {"mode": "infer"}
    whole, parts = (
        record(diffusers_job("AutoencoderKL", inputs, infer, **small, **{switch: on}), 4, AMPERE)
        for on in (False, True)
    )
    assert live_peak(parts) < live_peak(whole)


def live_peak(trace: Trace) -> int:
    """Return the most bytes that live at once."""
    live: dict[int, int] = {}
    peak = 0
    for event in trace.events:
        if isinstance(event, Alloc):
            live[event.block] = event.size_bytes
            peak = max(peak, sum(live.values()))
        elif isinstance(event, Free):
            live.pop(event.block)
    return peak


def test_what_is_unknown_is_refused(tmp_path: Path) -> None:
    """Unknown classes, arguments, inputs and folders are refused in one line."""
    with pytest.raises(UsageError, match="diffusers has no model class 'UNet2D'; the nearest: UNet2DModel"):
        diffusers_job("UNet2D")
    with pytest.raises(UsageError, match="takes no such argument; the nearest: sample_size"):
        diffusers_job("UNet2DModel", sample_siz=3)
    with pytest.raises(UsageError, match="UNet2DModel takes no such argument"):
        diffusers_job("UNet2DModel", enable_slicing=True)
    with pytest.raises(UsageError, match="UNet2DModel takes no 'latents'"):
        diffusers_job("UNet2DModel", inputs=("latents=3x8x8",))
    with pytest.raises(UsageError, match="its inputs are unknown; give one sample of each by keyword"):
        diffusers_job("MochiTransformer3DModel")
    with pytest.raises(UsageError, match="nothing is fetched from a hub"):
        diffusers_job("stabilityai/sdxl")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="names no _class_name"):
        diffusers_job(str(tmp_path))
