"""LoRA of peft on a U-Net or a transformer, from cached latents and texts."""

import argparse
import json

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from diffusers.training_utils import EMAModel, cast_training_params
from models import WIDTH, make_flux, make_sd3, make_unet
from peft import LoraConfig

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": torch.float32}
MAKERS = {"unet": make_unet, "sdxl": lambda: make_unet(sdxl=True), "sd3": make_sd3, "flux": make_flux}


class LoraTraining:
    def __init__(
        self,
        kind="unet",
        precision="fp16",
        rank=4,
        checkpointing=False,
        eight_bit=False,
        ema=False,
    ):
        self.kind, self.device, self.weight_dtype = kind, torch.device("cuda"), DTYPES[precision]
        self.model = MAKERS[kind]()
        self.model.requires_grad_(False)
        self.model.to(self.device, dtype=self.weight_dtype)
        if checkpointing:
            self.model.enable_gradient_checkpointing()
        targets = ["to_k", "to_q", "to_v", "to_out.0"]
        self.model.add_adapter(
            LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=targets)
        )
        if self.weight_dtype != torch.float32:
            cast_training_params(self.model, dtype=torch.float32)
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.ema = EMAModel(self.parameters) if ema else None
        if self.ema is not None:
            self.ema.to(self.device)
        if eight_bit:
            import bitsandbytes as bnb

            self.optimizer = bnb.optim.AdamW8bit(self.parameters, lr=1e-4)
        else:
            self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self.scheduler = DDPMScheduler(num_train_timesteps=1000)
        self.enabled = precision != "no"

    def step(self, batch):
        latents = batch["latents"].to(self.device, dtype=self.weight_dtype)
        states = batch["states"].to(self.device, dtype=self.weight_dtype)
        noise = torch.randn_like(latents)
        count = latents.shape[0]
        timesteps = torch.randint(0, 1000, (count,), device=self.device)
        with torch.autocast("cuda", dtype=self.weight_dtype, enabled=self.enabled):
            if self.kind in ("unet", "sdxl"):
                noisy = self.scheduler.add_noise(latents, noise, timesteps)
                prediction = self.model(noisy, timesteps, states, **self.added(states), return_dict=False)[0]
                target = noise
            else:
                sigmas = (timesteps / 1000).to(latents.dtype).view(-1, *[1] * (latents.dim() - 1))
                noisy = (1.0 - sigmas) * latents + sigmas * noise
                prediction = self.model(noisy, **self.conditions(states, timesteps), return_dict=False)[0]
                target = noise - latents
            loss = F.mse_loss(prediction.float(), target.float(), reduction="mean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.step(self.parameters)
        return loss

    def added(self, states):
        if self.kind == "unet":
            return {}
        ids = torch.zeros(states.shape[0], 6, device=self.device, dtype=self.weight_dtype)
        return {"added_cond_kwargs": {"text_embeds": states[:, 0], "time_ids": ids}}

    def conditions(self, states, timesteps):
        given = {"encoder_hidden_states": states, "pooled_projections": states[:, 0], "timestep": timesteps}
        if self.kind == "sd3":
            return given
        given["timestep"] = timesteps / 1000
        given["txt_ids"] = torch.zeros(states.shape[1], 3, device=self.device, dtype=self.weight_dtype)
        given["img_ids"] = torch.zeros(256, 3, device=self.device, dtype=self.weight_dtype)
        return given


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    training = LoraTraining(**args.options)
    shape = {"sd3": (16, 32, 32), "flux": (256, 64)}.get(training.kind, (4, 32, 32))
    for _ in range(args.steps):
        batch = {
            "latents": torch.randn(args.batch_size, *shape),
            "states": torch.randn(args.batch_size, 77, WIDTH),
        }
        loss = training.step(batch)
        print(loss.item())
