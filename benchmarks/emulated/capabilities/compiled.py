"""Models called through torch.compile in its default mode, dynamo, AOTAutograd and inductor as they are."""

from collections.abc import Iterator
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.capabilities.user_files import FILES
from benchmarks.emulated.jobs import DrawnJob

MODELS = f"{FILES}/compiled_models.py"
_SMALL: dict[str, Any] = {"input": "64:int64", "optimizer": "adamw"}
_LAYERS: dict[str, Any] = {**_SMALL, "model_arg": {"num_hidden_layers": 2}}
_GPT: dict[str, Any] = {**_SMALL, "model_arg": {"n_layer": 2, "use_cache": False}}
_JOBS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("torchvision:resnet18", 32, "RTX 3090", {}),
    ("torchvision:resnet18", 32, "RTX 3090", {"precision": "amp-bf16"}),
    ("hf:BertForSequenceClassification", 8, "RTX 3090", _LAYERS),
    ("torchvision:squeezenet1_1", 16, "RTX 4090", {"optimizer": "adam"}),
    ("torchvision:alexnet", 32, "A100 40GB", {}),
    ("hf:GPT2LMHeadModel", 4, "RTX 4090", _GPT),
    ("torchvision:vgg11", 8, "L4", {}),
    ("hf:LlamaForCausalLM", 2, "A100 40GB", {
        **_SMALL,
        "model_arg": {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1408,
                      "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8000,
                      "use_cache": False},
    }),
    ("torchvision:mobilenet_v3_small", 32, "H100 80GB", {"memory_format": "channels_last"}),
    ("timm:vit_tiny_patch16_224", 8, "H100 80GB", {"optimizer": "adamw"}),
    ("timm:mixer_s32_224", 8, "RTX 3060", {"precision": "amp-fp16"}),
    ("hf:DistilBertForSequenceClassification", 8, "T4", {**_SMALL, "model_arg": {"n_layers": 2}}),
    ("torchvision:shufflenet_v2_x0_5", 32, "RTX 3060", {}),
    ("timm:resnet10t", 16, "L4", {"mode": "infer"}),
    ("timm:convnext_atto", 16, "RTX 3090", {"precision": "amp-bf16"}),
    ("hf:RobertaForMaskedLM", 4, "RTX 3090", {**_LAYERS, "precision": "amp-bf16"}),
    ("torchvision:googlenet", 8, "A10", {}),
    ("hf:T5ForConditionalGeneration", 2, "RTX 3090", {
        **_SMALL, "model_arg": {"num_layers": 2, "num_decoder_layers": 2, "use_cache": False}}),
    ("timm:deit_tiny_patch16_224", 8, "RTX 5090", {"evaluate": True}),
    ("torchvision:mnasnet0_5", 16, "RTX 2080 Ti", {"clip_gradients": "norm"}),
    ("hf:BertForSequenceClassification", 8, "RTX 4090", _SMALL),
    ("timm:regnetx_002", 32, "RTX 4090", {"accumulate": 2}),
    ("hf:OPTForCausalLM", 2, "A100 40GB", {
        **_SMALL, "precision": "bf16",
        "model_arg": {"num_hidden_layers": 2, "hidden_size": 512, "ffn_dim": 2048, "num_attention_heads": 8,
                      "word_embed_proj_dim": 512, "use_cache": False},
    }),
    ("torchvision:efficientnet_b0", 8, "L40S 48GB", {"optimizer": "rmsprop", "precision": "amp-bf16"}),
    ("hf:GPT2LMHeadModel", 4, "RTX 3090", {**_SMALL, "model_arg": {"n_layer": 2}}),
    ("hf:Qwen2ForCausalLM", 2, "RTX 4090", {
        **_SMALL, "precision": "amp-bf16",
        "model_arg": {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1408,
                      "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8000},
    }),
)  # fmt: skip


# Training scripts that compile by themselves: file and name of the step.
_SCRIPTS: tuple[tuple[str, int, str, tuple[str, ...]], ...] = (
    ("compiled_gpt.py:train_step", 8, "RTX 3090", ("128:int64", "128:int64")),
    ("compiled_autoencoder.py:Trainer", 16, "RTX 4090", ("3x64x64",)),
)

_OPTIONS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("torchvision:resnet18", 16, "RTX 3090", {"ema": True}),
    ("torchvision:resnet18", 16, "RTX 3090", {"freeze": ["layer1.*", "layer2.*", "conv1.*", "bn1.*"]}),
    ("torchvision:resnet18", 16, "RTX 3090", {"mode": "forward"}),
)

_IMAGES: dict[str, Any] = {"input": "3x64x64", "target": "scalar:int64"}
_TOKENS: dict[str, Any] = {"input": "64x128", "target": "scalar:int64"}

# Drawn anew, of families without a row above.
_FRESH: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("timm:mobilenetv3_small_050", 16, "RTX 3060", {"precision": "amp-fp16", "optimizer": "adamw"}),
    (f"{MODELS}:MishNet", 16, "RTX 3090", _IMAGES),
    (f"{MODELS}:MishNet", 8, "L4", {**_IMAGES, "precision": "amp-bf16", "optimizer": "rmsprop"}),
    (f"{MODELS}:Normalized", 8, "RTX 4090", {**_TOKENS, "precision": "amp-bf16"}),
    ("hf:ViTForImageClassification", 8, "A100 40GB", {
        "mode": "infer", "precision": "bf16", "model_arg": {"num_hidden_layers": 2}}),
)  # fmt: skip


def _cases() -> Iterator[Case]:
    for number, (model, batch, gpu, options) in enumerate(_JOBS):
        yield Case(DrawnJob(number, model, batch, gpu, {**options, "compile": "default"}))
    for number, (script, batch, gpu, samples) in enumerate(_SCRIPTS, len(_JOBS)):
        file = f"{FILES}/{script.partition(':')[0]}"
        options = {"input": list(samples), "compile": "default"}
        command = (file, "--batch-size", str(batch), "--steps", "3")
        yield Case(DrawnJob(number, f"{FILES}/{script}", batch, gpu, options), command, stop_after=1000)
    for number, (model, batch, gpu, options) in enumerate(_OPTIONS, len(_JOBS) + len(_SCRIPTS)):
        yield Case(DrawnJob(number, model, batch, gpu, {**options, "compile": "default"}))
    first = len(_JOBS) + len(_SCRIPTS) + len(_OPTIONS)
    for number, (model, batch, gpu, options) in enumerate(_FRESH, first):
        yield Case(DrawnJob(number, model, batch, gpu, {"compile": "default", **options}))


CAPABILITY = Capability("models called through `torch.compile`", tuple(_cases()))
