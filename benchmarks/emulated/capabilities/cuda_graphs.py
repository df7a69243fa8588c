"""Models called through torch.compile with CUDA graphs, `mode="reduce-overhead"`."""

from collections.abc import Iterator
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

_TEXT: dict[str, Any] = {"input": "64:int64", "optimizer": "adamw"}
_JOBS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("torchvision:resnet18", 32, "RTX 3090", {}),
    ("hf:BertForSequenceClassification", 8, "RTX 3090", {**_TEXT, "model_arg": {"num_hidden_layers": 2}}),
    ("hf:GPT2LMHeadModel", 4, "RTX 4090", {**_TEXT, "model_arg": {"n_layer": 2, "use_cache": False}}),
    ("torchvision:alexnet", 32, "A100 40GB", {"optimizer": "adam"}),
    ("torchvision:vgg11", 8, "L4", {"precision": "amp-bf16"}),
    ("timm:vit_tiny_patch16_224", 8, "H100 80GB", {"optimizer": "adamw"}),
    ("torchvision:squeezenet1_1", 16, "T4", {"zero_grad": "before-backward"}),
    ("timm:mixer_s32_224", 8, "RTX 3060", {"precision": "amp-fp16"}),
    ("timm:resnet10t", 16, "L4", {"mode": "infer"}),
    ("timm:convnext_atto", 16, "RTX 3090", {"clip_gradients": "norm"}),
    ("hf:RobertaForMaskedLM", 4, "RTX 3090", {
        **_TEXT, "precision": "amp-bf16", "model_arg": {"num_hidden_layers": 2}}),
    ("timm:deit_tiny_patch16_224", 8, "RTX 5090", {"evaluate": True}),
)  # fmt: skip


def _cases() -> Iterator[Case]:
    for number, (model, batch, gpu, options) in enumerate(_JOBS):
        yield Case(DrawnJob(number, model, batch, gpu, {**options, "compile": "reduce-overhead"}))


CAPABILITY = Capability('models called through `torch.compile(mode="reduce-overhead")`', tuple(_cases()))
