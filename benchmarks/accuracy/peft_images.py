"""Hold plans of peft's methods against its comparison of image generation: FLUX.2 klein on an L40S.

    python -m benchmarks.accuracy.peft_images

The runs record the reserved memory after each step, whose 99th
percentile is that of the training loop. Prompts and latents of the 14 images were computed before and stay on
the GPU, and so does DINOv2, which judges images in between.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import planner
from benchmarks.accuracy.peft_methods import print_rows
from benchmarks.rows import read_lines

ROWS = Path(__file__).parents[1] / "published" / "peft_images.csv"
GIB_IN_MIB = 1024
# The transformer as its number of weights, 3,875,544,576, has it; its prompts have 512 tokens.
CONFIG: dict[str, Any] = {
    "in_channels": 128, "num_layers": 5, "num_single_layers": 20, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 7680, "mlp_ratio": 3.0, "guidance_embeds": False,
}  # fmt: skip
IMAGES, PLACES, TOKENS = 14, 32, 512  # 512 pixels are 32 patches of latents
TARGETS = (
    "to_out.0", "to_add_out", "to_qkv_mlp_proj", "add_k_proj", "add_q_proj", "add_v_proj", "to_k", "to_q",
    "to_v", "linear_in", "linear_out",
)  # fmt: skip


class Step:
    """A step of the comparison's loop, of one method."""

    def __init__(self, method: str, arguments: str) -> None:
        import peft
        from diffusers import Flux2Transformer2DModel
        from transformers import Dinov2Config, Dinov2Model

        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)  # as it is loaded: never on the GPU in float32
            transformer = Flux2Transformer2DModel(**CONFIG)
            torch.set_default_dtype(torch.float32)
            self.judge = Dinov2Model(Dinov2Config(patch_size=14, image_size=518)).requires_grad_(False)
        transformer.to(torch.bfloat16)
        transformer.enable_gradient_checkpointing()
        values = {key: int(value) for key, value in (one.split("=") for one in arguments.split())}
        kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(method.upper())]
        extra = {"feedforward_modules": [*TARGETS]} if method == "ia3" else {}
        self.model = peft.get_peft_model(transformer, kind(target_modules=[*TARGETS], **values, **extra))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        kept = {"dtype": torch.bfloat16, "device": "cuda"}
        self.prompts = torch.zeros(IMAGES, TOKENS, CONFIG["joint_attention_dim"], **kept)
        self.latents = torch.zeros(IMAGES, 128, PLACES, PLACES, **kept)
        self.text_ids = torch.zeros(IMAGES, TOKENS, 4, dtype=torch.int64, device="cuda")

    def step(self, indices: Tensor) -> None:
        """Train on the images of these indices."""
        chosen = indices.to("cuda")
        latents, prompts = self.latents.index_select(0, chosen), self.prompts.index_select(0, chosen)
        text_ids = self.text_ids.index_select(0, chosen)
        size = latents.shape[0]
        image_ids = torch.zeros(size, PLACES * PLACES, 4, dtype=torch.int64, device="cuda")
        noise = torch.randn_like(latents)
        sigmas = torch.zeros(size, 1, 1, 1, dtype=torch.bfloat16, device="cuda")
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        packed = noisy.flatten(2).transpose(1, 2)
        self.optimizer.zero_grad(set_to_none=True)
        predicted = self.model(
            hidden_states=packed, timestep=torch.zeros(size, device="cuda"), guidance=None,
            encoder_hidden_states=prompts, txt_ids=text_ids, img_ids=image_ids, return_dict=False,
        )[0]  # fmt: skip
        predicted = predicted.transpose(1, 2).reshape(latents.shape)
        target = noise - latents
        error = (torch.ones_like(sigmas).float() * (predicted.float() - target.float()) ** 2).reshape(
            size, -1
        )
        loss = torch.mean(error, 1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def reserved_gib(row: dict[str, str]) -> float:
    """Return the planned peak of reserved memory of a run."""
    arguments = {"method": row["method"], "arguments": row["arguments"]}
    result = planner.estimate(f"{__file__}:Step", 2, gpu="L40S", model_arg=arguments, input="scalar:int64")
    planned: float = result.to_dict()["peak_reserved_mib"]
    return planned / GIB_IN_MIB


if __name__ == "__main__":
    print_rows(read_lines(ROWS), reserved_gib)
