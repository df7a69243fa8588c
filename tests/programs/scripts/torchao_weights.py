"""Train or run a Llama whose weights torchao holds, in a step of one's own.

python torchao_weights.py '{"weights": "int8", "batch": 4, "tokens": 128, ...}'
"""

import json
import sys
from typing import Any

import peft
import torch
import torchao.quantization as ao
import transformers
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.quantized_training import (
    Int8MixedPrecisionTrainingConfig,
    int8_weight_only_quantized_training,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

_TILES = "tile_packed_to_4d"  # the packing whose kernels torch itself has
CONFIGS: dict[str, Any] = {
    "int8": ao.Int8WeightOnlyConfig,
    "int8-groups": lambda: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(64)),
    "int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig,
    "int4": lambda: ao.Int4WeightOnlyConfig(group_size=64, int4_packing_format=_TILES),
    "float8": ao.Float8WeightOnlyConfig,
    "int8-training": int8_weight_only_quantized_training,
    "int8-mixed": Int8MixedPrecisionTrainingConfig,
}


class QLoRALinear(nn.Module):
    """A frozen layer in NF4 with an adapter."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(to_nf4(layer.weight), requires_grad=False)
        kind: Any = {"dtype": layer.weight.dtype, "device": layer.weight.device, "bias": False}
        self.down = nn.Linear(layer.in_features, rank, **kind)
        self.up = nn.Linear(rank, layer.out_features, **kind)

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output to the layer's."""
        return linear_nf4(x, self.weight) + self.up(self.down(x))


def is_inner(module: nn.Module, name: str) -> bool:
    """Return whether a layer is a linear one within the blocks."""
    return isinstance(module, nn.Linear) and "lm_head" not in name and "lora" not in name


class Training:
    """A Llama with the weights of one kind."""

    def __init__(
        self,
        weights: str,
        place: str = "cpu",  # where weights are quantized: there, on the GPU, or moved there one by one
        width: int = 512,
        layers: int = 3,
        lora: bool = False,
        trains: bool = True,
        checkpoints: bool = False,
        optimizer: str = "AdamW",
        rows: bool = False,
        dtype: str = "bfloat16",
    ) -> None:
        config = transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            vocab_size=16000,
        )
        model: Any = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
        if place == "gpu":
            model = model.cuda()
        if weights == "nf4":
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            for name, module in [*model.named_modules()]:
                for child, layer in [*module.named_children()]:
                    if is_inner(layer, f"{name}.{child}"):
                        setattr(module, child, QLoRALinear(layer, 8))
        elif weights == "float8-training":
            recipe = Float8LinearConfig.from_recipe_name("rowwise") if rows else None
            convert_to_float8_training(model, config=recipe, module_filter_fn=is_inner)
        else:
            device = "cuda" if place == "each" else None
            ao.quantize_(model, CONFIGS[weights](), filter_fn=is_inner, device=device)
        if lora:
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            )
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = model.to("cuda")
        self.trains = trains
        trained = [one for one in model.parameters() if one.requires_grad]
        if not trains:
            trained = [nn.Parameter(torch.zeros(1))]  # on the CPU, so that there are steps
        self.optimizer = getattr(torch.optim, optimizer)(trained)

    def step(self, tokens: Tensor) -> None:
        """Run one step."""
        tokens = tokens.to("cuda")
        if not self.trains:
            with torch.no_grad():
                self.model(input_ids=tokens)
            self.optimizer.step()
            return
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    batch, tokens = given.pop("batch"), given.pop("tokens", 128)
    training = Training(**given)
    for _ in range(3):
        training.step(torch.zeros(batch, tokens, dtype=torch.int64))
