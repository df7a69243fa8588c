"""Trainers of TRL: direct preference optimization, reward models and supervised fine-tuning.

The emulated side is the same script's `train()`. Kernels compute nothing there, so that masks of tokens get
their number of true elements from the script. Both sides need trl, datasets and pandas.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, cases_of_script

SCRIPT = "benchmarks/emulated/capabilities/scripts/preferences.py"
_WIDE = {"vocab_size": 64000}
_JOBS: tuple[tuple[str, int, str, Mapping[str, Any]], ...] = (
    ("dpo", 4, "RTX 3090", {}),
    ("dpo", 8, "RTX 3090", {"lora": 16, "tokens": 256}),
    ("dpo", 8, "A100 80GB", {**_WIDE, "lora": 16, "copies": True}),
    ("dpo", 8, "L4", {**_WIDE, "gradient_checkpointing": False, "tokens": 512}),
    ("dpo", 4, "H100", {"loss_type": ["ipo"], "dtype": "float32"}),
    ("dpo", 8, "RTX 3090", {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
    ("dpo", 16, "RTX 4090", {"loss_type": ["aot"], "ld_alpha": 0.5, "prompt": 64}),
    ("dpo", 4, "RTX 3090", {"gradient_accumulation_steps": 4, "optim": "adamw_torch_fused"}),
    ("dpo", 8, "T4", {"bf16": False, "fp16": True, "dtype": "float32", "use_weighting": True}),
    ("dpo", 8, "RTX 3090", {"family": "Qwen2", "f_divergence_type": "js_divergence", "max_grad_norm": 0.0}),
    ("dpo", 6, "RTX 3090", {"precompute_ref_log_probs": True, "tokens": 256, **_WIDE}),
    ("reward", 4, "RTX 3090", {}),
    ("reward", 16, "A100 80GB", {"lora": 16, "tokens": 256}),
    ("reward", 8, "L4", {"gradient_checkpointing": False, "center_rewards_coefficient": 0.01}),
    ("reward", 8, "RTX 3090", {"family": "Qwen2", "dtype": "float32", "optim": "adafactor"}),
    ("sft", 4, "RTX 3090", {}),
    ("sft", 16, "RTX 3090", {**_WIDE, "lora": 16, "gradient_checkpointing": False}),
    ("sft", 8, "H100", {**_WIDE, "tokens": 512, "optim": "sgd", "gradient_accumulation_steps": 2}),
)

CAPABILITY = Capability(
    "DPO, reward models and SFT by the trainers of TRL", cases_of_script(SCRIPT, "trainer", _JOBS)
)
