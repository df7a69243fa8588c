"""Optimizers by name: all classes of torch.optim that need no closure, and those of libraries.

Small batches, so that the peak lies in the optimizer's step wherever that can be.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

_CNN: dict[str, Any] = {"input": "3x64x64"}
_LLAMA: dict[str, Any] = {
    "input": "128:int64",
    "model_arg": {
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 8000,
    },
}
_MODELS = {
    "torchvision:resnet18": (4, _CNN),
    "hf:LlamaForCausalLM": (2, _LLAMA),
    "timm:vit_tiny_patch16_224": (4, {}),
}
_CNN_NAME, _LLAMA_NAME, _VIT_NAME = _MODELS
_FILE = "benchmarks/emulated/capabilities/scripts/several_optimizers.py"
_TORCH = (
    "SGD",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
)
_BNB = "bitsandbytes.optim"
_FUSED = ("sgd", "adam", "adamw", "adagrad")
_ARGUMENTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (_LLAMA_NAME, "adamw", {"amsgrad": True}),
    (_CNN_NAME, "adam", {"amsgrad": True, "weight_decay": 0.01}),
    (_LLAMA_NAME, "NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.01}),
    (_CNN_NAME, "RMSprop", {"centered": True, "momentum": 0.9}),
    (_LLAMA_NAME, "RAdam", {"maximize": True}),
    (_CNN_NAME, "adamw", {"capturable": True}),
    (_VIT_NAME, "SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
)
_RECIPES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (_LLAMA_NAME, "NAdam", {"precision": "amp-fp16", "clip_gradients": "norm"}),
    (_LLAMA_NAME, "Adamax", {"precision": "bf16"}),
    (_CNN_NAME, "RAdam", {"memory_format": "channels_last", "precision": "amp-bf16"}),
    (_VIT_NAME, f"{_FILE}:muon_and_adamw", {"precision": "amp-fp16", "clip_gradients": "norm"}),
    (_LLAMA_NAME, f"{_FILE}:muon_and_adamw", {}),
    (_VIT_NAME, f"{_FILE}:without_decay_of_biases", {}),
)
_LIBRARIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *((_CNN_NAME, f"{_BNB}.{name}", {}) for name in ("AdamW8bit", "Lion8bit", "PagedAdamW8bit")),
    *((_LLAMA_NAME, f"{_BNB}.{name}", {}) for name in ("AdamW8bit", "PagedAdamW", "AdEMAMix8bit")),
    *((_VIT_NAME, f"{_BNB}.{name}", {}) for name in ("Adam8bit", "RMSprop8bit", "Adagrad8bit")),
    (_VIT_NAME, f"{_BNB}.SGD8bit", {"optimizer_arg": {"momentum": 0.9}}),
    (_LLAMA_NAME, f"{_BNB}.PagedLion8bit", {"precision": "bf16"}),
    (_CNN_NAME, f"{_BNB}.LARS", {"optimizer_arg": {"momentum": 0.9}}),
    *((_LLAMA_NAME, f"torchao.optim.{name}", {}) for name in ("AdamW8bit", "AdamW4bit", "Adam8bit")),
    (_VIT_NAME, "torchao.optim.AdamW8bit", {}),
    (
        _LLAMA_NAME,
        "torchao.optim.AdamW4bit",
        {"precision": "bf16", "optimizer_arg": {"bf16_stochastic_round": True}},
    ),
    (_LLAMA_NAME, "torchao.optim.AdamWFp8", {"gpu": "L4"}),
    (_LLAMA_NAME, "torchao.optim.CPUOffloadOptimizer", {}),
    (_CNN_NAME, "torchao.optim.CPUOffloadOptimizer", {"optimizer_arg": {"offload_gradients": True}}),
    (_LLAMA_NAME, "lion_pytorch.Lion", {}),
    (_LLAMA_NAME, "transformers.optimization.Adafactor", {}),
    (_CNN_NAME, "transformers.optimization.Adafactor", {"optimizer_arg": {"beta1": 0.9}}),
)


def _jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in _TORCH:
        yield _CNN_NAME, {"optimizer": name}
        yield _LLAMA_NAME, {"optimizer": name, "optimizer_impl": "for-loop"}
    for name in _FUSED:
        yield _VIT_NAME, {"optimizer": name, "optimizer_impl": "fused"}
    yield _VIT_NAME, {"optimizer": "Adafactor"}
    yield _LLAMA_NAME, {"optimizer": "Adafactor", "optimizer_impl": "foreach"}
    for model, name, arguments in _ARGUMENTS:
        yield model, {"optimizer": name, "optimizer_arg": arguments}
    for model, name, options in (*_RECIPES, *_LIBRARIES):
        yield model, {"optimizer": name, **options}


def _cases() -> Iterator[Case]:
    for number, (model, options) in enumerate(_jobs(), start=1):
        batch, given = _MODELS[model]
        gpu = options.pop("gpu", "RTX 3090")
        yield Case(DrawnJob(number, model, batch, gpu, {**given, **options}))


_CAUSES = {
    14: "the emulated run reads the `mu` of ASGD, which a kernel fills, as 0 and takes another branch in the "
    "first step than a GPU, where it is 1",
    59: "inductor fuses FP8 conversions of large parameters into the kernel before, without their buffers",
}
CAPABILITY = Capability(
    "every class of torch.optim without a closure, bitsandbytes, torchao (its compiled steps with cached "
    "kernels) and others",
    tuple(_cases()),
    _CAUSES,
)
