"""Models of images, texts and speech: LLaVA and its kind, CLIP, detectors and segmentation, SAM, Whisper."""

from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

_TEXT = {
    "text_config__hidden_size": 256,
    "text_config__num_hidden_layers": 3,
    "text_config__num_attention_heads": 4,
    "text_config__num_key_value_heads": 2,
    "text_config__intermediate_size": 512,
    "text_config__vocab_size": 4096,
    "image_token_id": 4000,
}
_VISION = {
    "vision_config__hidden_size": 128,
    "vision_config__num_hidden_layers": 3,
    "vision_config__num_attention_heads": 4,
    "vision_config__intermediate_size": 256,
}
_BOTH = {**_TEXT, **_VISION}
_SMALL_CLIP = {
    f"{part}_config__{key}": value
    for part in ("text", "vision")
    for key, value in (
        ("hidden_size", 128),
        ("intermediate_size", 256),
        ("num_hidden_layers", 3),
        ("num_attention_heads", 4),
    )
}
_INDEX = {**_BOTH, "image_token_index": 4000}
del _INDEX["image_token_id"]
_PATCHES = {"vision_config__image_size": 224, "vision_config__patch_size": 14}
_QWEN = {
    **_TEXT,
    "text_config__hidden_size": 512,
    "vision_config__depth": 3,
    "vision_config__num_heads": 4,
}
_QWEN_2_5 = {
    "vision_config__hidden_size": 128,
    "vision_config__intermediate_size": 256,
    "vision_config__out_hidden_size": 512,
}
_WHISPER = {
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 256 for part in ("encoder", "decoder")},
    "d_model": 128,
}
_WAVES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
_ADAMW: dict[str, Any] = {"optimizer": "adamw"}

_NOT_EMULATED = "planned, not emulated, where kernels compute nothing and the model reads a result of one"

_JOBS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("LlavaForConditionalGeneration", 3, "RTX 3090", {"model_arg": _INDEX, **_ADAMW}),
    (
        "LlavaForConditionalGeneration",
        4,
        "A100 40GB",
        {"model_arg": _INDEX, **_ADAMW, "precision": "bf16", "checkpoint": "blocks"},
    ),
    (
        "PaliGemmaForConditionalGeneration",
        2,
        "L4",
        {"model_arg": {**_BOTH, "projection_dim": 256}, **_ADAMW, "precision": "amp-bf16"},
    ),
    (
        "Gemma3ForConditionalGeneration",
        2,
        "RTX 4090",
        {
            "model_arg": {
                **_BOTH,
                "mm_tokens_per_image": 64,
                "vision_config__image_size": 256,
                "vision_config__patch_size": 16,
            },
            **_ADAMW,
        },
    ),
    ("InternVLForConditionalGeneration", 2, "H100 80GB", {"model_arg": _BOTH, **_ADAMW, "precision": "bf16"}),
    (
        "AyaVisionForConditionalGeneration",
        2,
        "A10",
        {"model_arg": {**_BOTH, "vision_config__image_size": 224}, **_ADAMW, "freeze": "*vision*"},
    ),
    (
        "Blip2ForConditionalGeneration",
        2,
        "RTX 3090",
        {
            "model_arg": {
                **_VISION,
                "qformer_config__hidden_size": 128,
                "qformer_config__num_hidden_layers": 2,
                "qformer_config__num_attention_heads": 4,
                "qformer_config__intermediate_size": 256,
                "qformer_config__encoder_hidden_size": 128,
                "text_config__hidden_size": 256,
                "text_config__num_hidden_layers": 2,
                "text_config__num_attention_heads": 4,
                "text_config__ffn_dim": 512,
                "text_config__word_embed_proj_dim": 256,
            },
            **_ADAMW,
        },
    ),
    ("CLIPModel", 24, "RTX 3060", {"model_arg": _SMALL_CLIP, **_ADAMW}),
    ("SiglipModel", 17, "T4", {"model_arg": _SMALL_CLIP, **_ADAMW, "precision": "amp-fp16"}),
    ("DetrForObjectDetection", 2, "RTX 3090", {"input": "3x320x480", **_ADAMW, "clip_gradients": "norm"}),
    ("ConditionalDetrForObjectDetection", 3, "A10", {"input": "3x256x256", **_ADAMW}),
    ("YolosForObjectDetection", 2, "RTX 4090", {"model_arg": {"num_hidden_layers": 4}, **_ADAMW}),
    (
        "SamModel",
        1,
        "A100 40GB",
        {
            "model_arg": {
                "vision_config__num_hidden_layers": 3,
                "vision_config__global_attn_indexes": [2],
                "vision_config__hidden_size": 192,
            },
            **_ADAMW,
        },
    ),
    ("BlipForConditionalGeneration", 2, "RTX 3060", {**_ADAMW}),
    ("Idefics3ForConditionalGeneration", 2, "RTX 3090", {"model_arg": {**_BOTH, **_PATCHES}, **_ADAMW}),
    (
        "SmolVLMForConditionalGeneration",
        3,
        "A100 40GB",
        {"model_arg": {**_BOTH, **_PATCHES}, **_ADAMW, "precision": "bf16"},
    ),
    ("RTDetrForObjectDetection", 2, "RTX 3090", {"input": "3x256x256", **_ADAMW}),
    ("RTDetrV2ForObjectDetection", 2, "L4", {"input": "3x256x256", **_ADAMW, "precision": "amp-bf16"}),
    (
        "GroundingDinoForObjectDetection",
        2,
        "RTX 4090",
        {
            "model_arg": {
                **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
                **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
                **{f"{part}_ffn_dim": 128 for part in ("encoder", "decoder")},
                "d_model": 64,
            },
            "input": "pixel_values=3x256x256",
            **_ADAMW,
        },
    ),
    ("Mask2FormerForUniversalSegmentation", 2, "A10", {"input": "3x128x128", **_ADAMW}),
    ("MaskFormerForInstanceSegmentation", 2, "RTX 3060", {"input": "3x128x128", **_ADAMW}),
    ("Sam2Model", 1, "A100 40GB", {**_ADAMW}),
    ("WhisperForConditionalGeneration", 3, "RTX 3060", {"model_arg": _WHISPER, **_ADAMW}),
    (
        "WhisperForConditionalGeneration",
        4,
        "T4",
        {"model_arg": _WHISPER, **_ADAMW, "precision": "amp-fp16", "checkpoint": "blocks"},
    ),
    ("Wav2Vec2ForCTC", 2, "RTX 3090", {"model_arg": _WAVES, "input": "32000", **_ADAMW}),
    (
        "Wav2Vec2ForSequenceClassification",
        4,
        "RTX 2080 Ti",
        {"model_arg": _WAVES, "input": "48000", **_ADAMW, "precision": "amp-fp16"},
    ),
    ("HubertForSequenceClassification", 3, "H100 80GB", {"model_arg": _WAVES, "input": "32000", **_ADAMW}),
    (
        "Qwen2VLForConditionalGeneration",
        2,
        "RTX 3090",
        {
            "model_arg": {**_QWEN, "vision_config__embed_dim": 128, "vision_config__hidden_size": 512},
            **_ADAMW,
        },
    ),
    (
        "Qwen2_5_VLForConditionalGeneration",
        2,
        "A100 40GB",
        {"model_arg": {**_QWEN, **_QWEN_2_5}, **_ADAMW, "precision": "bf16"},
    ),
)

CAPABILITY = Capability(
    "models of images and texts, detectors and segmentation with their losses, and speech, of transformers",
    tuple(
        Case(DrawnJob(number, f"hf:{name}", batch, gpu, options))
        for number, (name, batch, gpu, options) in enumerate(_JOBS, 1)
    ),
    dict.fromkeys((15, 16), f"{_NOT_EMULATED}: which pictures are padding")
    | dict.fromkeys((17, 18, 19), f"{_NOT_EMULATED}: counts of objects, which split tensors")
    | dict.fromkeys((28, 29), f"{_NOT_EMULATED}: the patches of each image, which split tensors"),
)
