"""Fine-tune a model of transformers by the calls that guides of peft and transformers show.

    python finetune.py '{"model": "LlamaForCausalLM", "config": {...}, "batch": 4, "tokens": 128, ...}'

The model has random weights. `quantize` takes the keywords of BitsAndBytesConfig, `peft` those of the
configuration of a `method` of peft.
"""

import json
import sys
from typing import Any

import torch
import transformers


def main(options: dict[str, Any]) -> None:
    """Train for three steps."""
    kind = getattr(transformers, options["model"])
    config = kind.config_class(**options["config"])
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    model = kind(config).to(dtype)
    quantize = options.get("quantize")
    if quantize is not None:
        model = quantized(model, quantize).to("cuda")
    if "torchao" in options:
        hold_by_torchao(model, **options["torchao"])
    if options.get("prepare"):
        import peft

        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if "peft" in options:
        model = adapted(model, **options["peft"])
    model.to("cuda")
    if options.get("liger"):
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, None)
    if options.get("checkpoint"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    kind = getattr(torch.optim, options.get("optimizer", "AdamW"))
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    shape = (options["batch"], options["tokens"])
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)
    mask[0, -1] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    moved: dict[str, torch.Tensor] = {}
    model.train()
    for _ in range(3):
        moved.clear()
        moved.update({name: tensor.to("cuda") for name, tensor in batch.items()})
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bool(options.get("autocast"))):
            outputs = model(**moved)
            loss = outputs.loss
        loss.backward()
        optimizer.step()


def quantized(model: Any, given: dict[str, Any]) -> Any:
    """Return the model with bitsandbytes' layers, which quantize their weights when they are moved."""
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    for name in ("bnb_4bit_compute_dtype",):
        if name in given:
            given[name] = getattr(torch, given[name])
    config = transformers.BitsAndBytesConfig(**given)
    weights = {
        name: module.weight.data for name, module in model.named_modules() if hasattr(module, "weight")
    }
    biases = {name: module.bias for name, module in model.named_modules() if hasattr(module, "bias")}
    kept = HfQuantizer.get_modules_to_not_convert(model, config.llm_int8_skip_modules)
    model = replace_with_bnb_linear(model, kept, config)
    for name, module in model.named_modules():
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            module.weight = type(module.weight)(weights[name], requires_grad=False, **vars(module.weight))
            module.bias = biases[name]
    model.is_loaded_in_4bit = bool(given.get("load_in_4bit"))
    model.is_loaded_in_8bit = bool(given.get("load_in_8bit"))
    return model


def hold_by_torchao(model: Any, kind: str, **given: Any) -> None:
    """Quantize linear layers by torchao, each as it comes onto the GPU."""
    import torchao.quantization as ao
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype import quantized_training as training

    def is_inner(module: Any, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and "lm_head" not in name

    if kind == "float8-training":
        config = Float8LinearConfig.from_recipe_name(given.get("recipe_name", "tensorwise"))
        convert_to_float8_training(model, config=config, module_filter_fn=is_inner)
        return
    kinds = {
        "int8-weight-only": ao.Int8WeightOnlyConfig,
        "int8-training": training.int8_weight_only_quantized_training,
        "int8-mixed": training.int8_mixed_precision_training,
    }
    if kind == "int8-weight-only":
        model.requires_grad_(False)
    ao.quantize_(model, kinds[kind](**given), filter_fn=is_inner, device="cuda")


def adapted(model: Any, method: str, **given: Any) -> Any:
    """Return the model with adapters of peft."""
    import peft

    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(method.upper())](**given)
    return peft.get_peft_model(model, config)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
