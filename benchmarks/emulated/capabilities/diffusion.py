"""Diffusion models: UNets, transformers, autoencoders and ControlNets of diffusers."""

from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

_SMALL_UNET = {"block_out_channels": [64, 128, 128, 128], "cross_attention_dim": 128, "norm_num_groups": 16}
_SDXL = {
    "sample_size": 32,
    "block_out_channels": [64, 128, 256],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 4],
    "attention_head_dim": [1, 2, 4],
    "cross_attention_dim": 256,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 32,
    "projection_class_embeddings_input_dim": 448,
    "use_linear_projection": True,
}
_VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [32, 64, 128, 128],
    "layers_per_block": 2,
    "sample_size": 128,
}
_PIXART = {
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "num_layers": 6,
    "cross_attention_dim": 256,
    "caption_channels": 512,
    "sample_size": 64,
    "use_additional_conditions": False,
}
_SD3 = {
    "num_layers": 6,
    "num_attention_heads": 4,
    "joint_attention_dim": 512,
    "caption_projection_dim": 256,
    "pooled_projection_dim": 256,
    "sample_size": 64,
    "pos_embed_max_size": 96,
}
_FLUX = {
    "num_layers": 2,
    "num_single_layers": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "joint_attention_dim": 512,
    "pooled_projection_dim": 256,
    "axes_dims_rope": [16, 24, 24],
}
_TOKENS = ["hidden_states=256x64", "encoder_hidden_states=128x512"]
_WAN = {"num_attention_heads": 4, "attention_head_dim": 64, "num_layers": 3, "text_dim": 512, "ffn_dim": 512}

_JOBS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    (
        "UNet2DConditionModel",
        4,
        "RTX 3090",
        {"model_arg": {**_SMALL_UNET, "sample_size": 32}, "optimizer": "adamw"},
    ),
    (
        "UNet2DConditionModel",
        8,
        "A100 40GB",
        {"model_arg": _SMALL_UNET, "optimizer": "adamw", "precision": "amp-bf16", "checkpoint": "blocks"},
    ),
    ("UNet2DConditionModel", 3, "T4", {"model_arg": _SDXL, "precision": "amp-fp16", "optimizer": "adamw"}),
    (
        "UNet2DModel",
        6,
        "RTX 4090",
        {
            "model_arg": {"sample_size": 64, "block_out_channels": [64, 128, 128, 256]},
            "optimizer": "adam",
            "ema": True,
        },
    ),
    (
        "AutoencoderKL",
        2,
        "RTX 3060",
        {"model_arg": _VAE, "optimizer": "adamw", "memory_format": "channels_last"},
    ),
    ("AutoencoderKL", 2, "L4", {"model_arg": _VAE, "mode": "infer", "precision": "fp16"}),
    (
        "VQModel",
        4,
        "RTX 2080 Ti",
        {"model_arg": {"block_out_channels": [64], "sample_size": 64}, "optimizer": "adam"},
    ),
    (
        "DiTTransformer2DModel",
        8,
        "RTX 5090",
        {"model_arg": {"num_layers": 6, "num_attention_heads": 6, "out_channels": 8}, "optimizer": "adamw"},
    ),
    (
        "PixArtTransformer2DModel",
        4,
        "A10",
        {"model_arg": _PIXART, "optimizer": "adamw", "precision": "amp-bf16"},
    ),
    (
        "SD3Transformer2DModel",
        4,
        "H100 80GB",
        {"model_arg": _SD3, "optimizer": "adamw", "precision": "bf16", "checkpoint": "blocks"},
    ),
    (
        "FluxTransformer2DModel",
        3,
        "RTX 4090",
        {"model_arg": _FLUX, "input": _TOKENS, "optimizer": "adamw", "precision": "bf16"},
    ),
    (
        "ControlNetModel",
        3,
        "RTX 3090",
        {"model_arg": _SMALL_UNET, "input": ["sample=4x32x32"], "optimizer": "adamw", "accumulate": 2},
    ),
    (
        "WanTransformer3DModel",
        2,
        "A100 40GB",
        {
            "model_arg": _WAN,
            "input": ["hidden_states=16x5x16x24", "encoder_hidden_states=64x512"],
            "optimizer": "adamw",
            "precision": "amp-bf16",
        },
    ),
    (
        "SanaTransformer2DModel",
        4,
        "L4",
        {
            "model_arg": {
                "num_layers": 4,
                "num_attention_heads": 8,
                "attention_head_dim": 32,
                "num_cross_attention_heads": 4,
                "cross_attention_head_dim": 64,
                "cross_attention_dim": 256,
                "caption_channels": 512,
            },
            "optimizer": "adamw",
            "clip_gradients": "norm",
        },
    ),
    (
        "AutoencoderKL",
        4,
        "RTX 3060",
        {"model_arg": {**_VAE, "enable_slicing": True}, "mode": "infer", "precision": "fp16"},
    ),
    (
        "AutoencoderKL",
        1,
        "RTX 3090",
        {
            "model_arg": {**_VAE, "sample_size": 64, "enable_tiling": True},
            "input": ["sample=3x160x160"],
            "mode": "infer",
        },
    ),
)

CAPABILITY = Capability(
    "networks of diffusers, built on both sides from their configurations",
    tuple(
        Case(DrawnJob(number, f"diffusers:{name}", batch, gpu, options))
        for number, (name, batch, gpu, options) in enumerate(_JOBS, 1)
    ),
)
