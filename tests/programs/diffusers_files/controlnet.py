"""A ControlNet beside frozen models, as diffusers' example trains it."""

import argparse
import json

import torch
import torch.nn.functional as F
from diffusers import ControlNetModel, DDPMScheduler
from diffusers.optimization import get_scheduler
from models import make_text_encoder, make_unet, make_vae

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": torch.float32}


class ControlNetTraining:
    def __init__(self, precision="fp16", sdxl=False, checkpointing=True, eight_bit=False, accumulate=1):
        self.device = torch.device("cuda")
        self.weight_dtype = DTYPES[precision]
        self.precision, self.sdxl, self.accumulate = precision, sdxl, accumulate
        self.vae, self.unet, self.text_encoder = make_vae(), make_unet(sdxl), make_text_encoder()
        self.controlnet = ControlNetModel.from_unet(self.unet)
        for frozen in (self.vae, self.unet, self.text_encoder):
            frozen.requires_grad_(False)
        self.controlnet.train()
        if checkpointing:
            self.controlnet.enable_gradient_checkpointing()
        self.controlnet.to(self.device)
        for frozen in (self.vae, self.unet, self.text_encoder):
            frozen.to(self.device, dtype=self.weight_dtype)
        self.noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
        if eight_bit:
            import bitsandbytes as bnb

            optimizer_class = bnb.optim.AdamW8bit
        else:
            optimizer_class = torch.optim.AdamW
        self.optimizer = optimizer_class(self.controlnet.parameters(), lr=5e-6, weight_decay=1e-2)
        self.lr_scheduler = get_scheduler("constant", optimizer=self.optimizer)
        self.scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def step(self, batch):
        for start in range(self.accumulate):
            part = {key: value[start :: self.accumulate] for key, value in batch.items()}
            loss = self.loss(part) / self.accumulate
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.controlnet.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.lr_scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach().item()

    def loss(self, batch):
        if "latents" in batch:
            latents = batch["latents"].to(self.device, dtype=self.weight_dtype)
        else:
            pixel_values = batch["pixel_values"].to(self.device, dtype=self.weight_dtype)
            latents = self.vae.encode(pixel_values).latent_dist.sample()
            latents = latents * self.vae.config.scaling_factor
        noise = torch.randn_like(latents)
        bsz = latents.shape[0]
        timesteps = torch.randint(0, 1000, (bsz,), device=latents.device).long()
        noisy_latents = self.noise_scheduler.add_noise(latents.float(), noise.float(), timesteps)
        noisy_latents = noisy_latents.to(dtype=self.weight_dtype)
        encoder_hidden_states = self.text_encoder(batch["input_ids"].to(self.device), return_dict=False)[0]
        added = None
        if self.sdxl:
            added = {
                "text_embeds": encoder_hidden_states[:, 0],
                "time_ids": torch.zeros(bsz, 6, device=self.device, dtype=self.weight_dtype),
            }
        condition = batch["conditioning_pixel_values"].to(self.device, dtype=self.weight_dtype)
        with torch.autocast("cuda", dtype=self.weight_dtype, enabled=self.precision != "no"):
            down, mid = self.controlnet(
                noisy_latents,
                timesteps,
                encoder_hidden_states=encoder_hidden_states,
                controlnet_cond=condition,
                added_cond_kwargs=added,
                return_dict=False,
            )
        model_pred = self.unet(
            noisy_latents,
            timesteps,
            encoder_hidden_states=encoder_hidden_states,
            added_cond_kwargs=added,
            down_block_additional_residuals=[sample.to(dtype=self.weight_dtype) for sample in down],
            mid_block_additional_residual=mid.to(dtype=self.weight_dtype),
            return_dict=False,
        )[0]
        return F.mse_loss(model_pred.float(), noise.float(), reduction="mean")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cached", action="store_true")
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    training = ControlNetTraining(**args.options)
    size = args.batch_size
    for _ in range(args.steps):
        batch = {} if args.cached else {"pixel_values": torch.rand(size, 3, 256, 256)}
        if args.cached:
            batch["latents"] = torch.randn(size, 4, 32, 32)
        batch["conditioning_pixel_values"] = torch.rand(size, 3, 256, 256)
        batch["input_ids"] = torch.randint(5000, (size, 77))
        print(training.step(batch))
