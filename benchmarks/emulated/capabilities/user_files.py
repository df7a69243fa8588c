"""Training scripts as people write them, each planned by the name of its step and run as it is."""

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

FILES = "benchmarks/emulated/capabilities/files"

# File and name of its step; batch size; GPU; samples of what the step takes.
_SCRIPTS: tuple[tuple[str, int, str, tuple[str, ...]], ...] = (
    ("dcgan.py:train_step", 128, "RTX 3060", ("3x64x64",)),
    ("nanogpt.py:train_step", 32, "RTX 3090", ("256:int64", "256:int64")),
    ("mingpt.py:make_trainer", 64, "RTX 2080 Ti", ("128:int64", "128:int64")),
    ("simclr.py:SimCLR", 128, "RTX 3090", ("3x96x96", "3x96x96")),
    ("simclr_masked.py:train_step", 64, "RTX 4090", ("3x64x64", "3x64x64")),
    ("moco.py:Pretraining", 64, "T4", ("3x112x112", "3x112x112")),
    ("byol.py:BYOL", 32, "A10", ("3x96x96", "3x96x96")),
    ("ppo.py:PPO", 1024, "RTX 3060", ("4x84x84:uint8", "scalar:int64", "scalar", "scalar", "scalar")),
    (
        "dqn.py:Learner",
        256,
        "RTX 3060",
        ("4x84x84:uint8", "scalar:int64", "scalar", "4x84x84:uint8", "scalar:bool"),
    ),
    (
        "sac.py:SAC",
        4096,
        "RTX 4090",
        ("obs=376", "actions=17", "rewards=scalar", "next_obs=376", "dones=scalar"),
    ),
    ("detr.py:FineTuning", 8, "RTX 3090", ("images=3x256x256", "labels=8:int64", "boxes=8x4")),
    ("lora_gpt2.py:train_step", 8, "A100 40GB", ("256:int64",)),
    ("distillation.py:make_distiller", 64, "RTX 3060", ("3x128x128", "scalar:int64")),
    ("wgan_gp.py:WGAN", 256, "RTX 2080 Ti", ("3x32x32",)),
    ("vae.py:train_step", 128, "RTX 3060", ("3x64x64",)),
    ("lit_classifier.py:LitClassifier", 64, "RTX 3060", ("3x160x160", "scalar:int64")),
    ("lit_gan.py:GAN", 256, "RTX 3060", ("3x64x64", "scalar:int64")),
    ("segmentation.py:Training", 8, "RTX 3090", ("image=3x192x192", "mask=192x192:int64")),
    ("seq2seq.py:train_step", 64, "RTX 3060", ("40:int64", "41:int64")),
    ("lstm_lm.py:LanguageModel", 20, "RTX 3060", ("35:int64", "35:int64")),
    ("vqvae.py:train_step", 64, "T4", ("3x64x64",)),
    ("mean_teacher.py:MeanTeacher", 32, "RTX 3090", ("3x64x64", "scalar:int64", "3x64x64")),
    ("mae.py:Pretrainer", 64, "H100 80GB", ("3x96x96",)),
    ("cyclegan.py:train_step", 2, "RTX 3060", ("A=3x256x256", "B=3x256x256")),
    ("ddpm.py:DiffusionTrainer", 32, "RTX 5090", ("3x64x64",)),
    ("clip.py:make_trainer", 64, "L4", ("3x128x128", "77:int64")),
    ("sam_optimizer.py:train_step", 32, "RTX 3060", ("3x64x64", "scalar:int64")),
    ("nerf.py:Trainer", 1024, "RTX 4090", ("3", "3", "3")),
    ("ctc_speech.py:Recogniser", 16, "RTX 3090", ("80x800", "60:int64")),
    ("maml.py:meta_step", 4, "RTX 3090", ("50x3x80x80", "50:int64")),
    ("captured_step.py:Trainer", 512, "RTX 3090", ("512", "scalar:int64")),
    ("graphed_encoder.py:Classifier", 32, "RTX 4090", ("128:int64", "scalar:int64")),
    ("gradcache.py:Contrastive", 256, "RTX 3060", ("64:int64", "64:int64")),
    ("style_transfer.py:train_step", 4, "RTX 3060", ("3x256x256",)),
    ("unet_amp.py:Training", 8, "RTX 3060", ("image=3x160x160", "mask=160x160:int64")),
    ("graph_network.py:train_step", 256, "RTX 3090", ("64x16", "256x2:int64", "scalar")),
    ("timm_finetune.py:FineTuning", 32, "RTX 4090", ("3x224x224", "scalar:int64")),
    ("hidden_distillation.py:Training", 32, "RTX 3060", ("128:int64", "scalar:int64")),
    ("diffusion_ema.py:Trainer", 64, "RTX 3060", ("3x32x32",)),
    ("lit_autoencoder.py:LitAutoencoder", 64, "RTX 3060", ("3x64x64", "scalar:int64")),
)


def _case(number: int, script: str, batch: int, gpu: str, samples: tuple[str, ...]) -> Case:
    file = f"{FILES}/{script.partition(':')[0]}"
    job = DrawnJob(number, f"{FILES}/{script}", batch, gpu, {"input": list(samples)})
    # The script ends by itself after its three batches, however many optimizer steps each has.
    return Case(job, (file, "--batch-size", str(batch), "--steps", "3"), stop_after=1000)


CAPABILITY = Capability(
    "training scripts as people write them, planned by the name of their step",
    tuple(_case(number, *script) for number, script in enumerate(_SCRIPTS, 1)),
    {
        26: "of the emulated side: nn.TransformerEncoder compares its mask with a causal one and reads "
        "`.all()` (`_detect_is_causal_mask`), which is false there, since kernels compute nothing; a GPU "
        "takes causal flash attention, as planned",
    },
)
