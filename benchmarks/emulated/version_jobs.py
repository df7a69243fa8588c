"""Fixed jobs that are compared in each version of torch."""

from typing import Any

from benchmarks.emulated.jobs import DrawnJob

_MODULES = "benchmarks/emulated/version_modules.py"  # read from the root of the repository
_CLASS = {"target": "scalar:int64"}
_BF16_FUSED = {"precision": "amp-bf16", "optimizer": "adamw", "optimizer_impl": "fused"}
_LAST = {"memory_format": "channels_last"}
_Case = tuple[str, int, str, dict[str, Any]]


def _image(size: int, channels: int = 3) -> dict[str, Any]:
    return {"input": f"{channels}x{size}x{size}"}


_LIBRARIES: tuple[_Case, ...] = (
    ("torchvision:resnet50", 16, "RTX 3090", {}),
    ("torchvision:resnet18", 32, "T4", {"precision": "amp-fp16", "optimizer": "adamw"}),
    ("torchvision:mobilenet_v2", 16, "A100 40GB", {**_BF16_FUSED, **_LAST}),
    ("torchvision:vgg11_bn", 8, "RTX 3060", {"optimizer": "momentum"}),
    ("torchvision:densenet121", 8, "RTX 4090", {"precision": "amp-bf16", "optimizer": "adam"}),
    ("torchvision:efficientnet_b0", 8, "L4", {"optimizer": "rmsprop"}),
    ("torchvision:convnext_tiny", 8, "RTX 3060", {"optimizer": "adamw", **_image(160)}),
    ("torchvision:vit_b_16", 4, "A10", _BF16_FUSED),
    ("torchvision:swin_t", 4, "RTX 3090", {"optimizer": "adam", "optimizer_impl": "for-loop"}),
    ("torchvision:shufflenet_v2_x1_0", 16, "H100 80GB", {"accumulate": 2, "clip_gradients": "norm"}),
    ("timm:vit_tiny_patch16_224", 16, "RTX 3090", {"optimizer": "adamw"}),
    ("timm:resnet26d", 8, "A100 40GB", {"precision": "bf16", "optimizer": "adagrad", **_LAST}),
    ("timm:mixer_s32_224", 8, "T4", {"precision": "amp-fp16", "optimizer": "adafactor"}),
    ("hf:gpt2", 4, "RTX 3090", {"optimizer": "adamw"}),
    ("hf:bert", 4, "T4", {"precision": "amp-fp16", "optimizer": "adamw"}),
    ("hf:distilbert", 8, "A100 40GB", _BF16_FUSED),
    ("hf:t5", 4, "RTX 4090", {"optimizer": "adafactor"}),
    ("hf:modernbert", 2, "H100 80GB", {"precision": "bf16", "optimizer": "sgd"}),
)  # fmt: skip
_TEXT = {"input": "100:int64"}
_TOKENS = {"input": "100x256"}
_OWN: tuple[_Case, ...] = (
    ("Lstm", 16, "RTX 3090", {**_TEXT, "optimizer": "adamw"}),
    ("Lstm", 16, "RTX 3090", {**_TEXT, "precision": "amp-fp16", "optimizer": "adamw"}),
    ("Gru", 16, "A10", {"input": "50x64", "optimizer": "momentum"}),
    ("Encoder", 8, "RTX 3090", {**_TEXT, "optimizer": "adamw", "evaluate": True}),
    ("Encoder", 8, "A100 40GB", {**_TEXT, "precision": "amp-bf16", "optimizer": "adamw", "evaluate": True}),
    ("Seq2Seq", 8, "L4", {"input": "60x128", "optimizer": "adam", "ema": True}),
    ("Norms", 8, "RTX 3060", _image(64)),
    ("Norms", 8, "A100 40GB", {**_image(64), "precision": "amp-bf16", "optimizer": "adam"}),
    ("Attention", 8, "RTX 3090", {**_TOKENS, "optimizer": "adamw"}),
    ("Attention", 8, "H100 80GB", {**_TOKENS, "precision": "amp-bf16", "optimizer": "adamw"}),
    ("Attention", 8, "T4", {**_TOKENS, "precision": "amp-fp16", "optimizer": "adamw"}),
    ("Mlp", 64, "RTX 4090", {"input": "512", "optimizer": "adam", "clip_gradients": "value"}),
    ("Mlp", 64, "H100 80GB", {"input": "512", "precision": "amp-bf16", "optimizer": "adam"}),
    ("Indexing", 8, "RTX 3090", {**_image(48), "optimizer": "nesterov"}),
    ("Conv3d", 4, "A100 40GB", {"input": "1x32x32x32", "optimizer": "adam", "keep_grads": True}),
    ("Conv3d", 4, "RTX 3090", {"input": "1x32x32x32", "precision": "amp-fp16", "zero_grad": "after-step"}),
    ("Attention", 8, "T4", {**_TOKENS, "precision": "amp-bf16", "optimizer": "adamw"}),
    ("Attention", 4, "B200", {**_TOKENS, "precision": "amp-bf16", "optimizer": "adamw"}),
)
VERSION_JOBS = tuple(
    DrawnJob(number, model, batch, gpu, options)
    for number, (model, batch, gpu, options) in enumerate(
        (
            *_LIBRARIES,
            *((f"{_MODULES}:{name}", batch, gpu, {**_CLASS, **more}) for name, batch, gpu, more in _OWN),
        ),
        start=1,
    )
)
