"""Train on preferences with TRL: DPO, rewards and supervised fine-tuning, of small models without weights.

    python preferences.py '{"trainer": "dpo", "batch": 4, "loss_type": ["ipo"], "lora": 16, ...}'

The texts have as many tokens as words, all of one length. Keywords beside those of `Job` are those of TRL's
arguments.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


@dataclass(frozen=True)
class Job:
    """Model and texts."""

    family: str = "Llama"
    dtype: str = "bfloat16"
    layers: int = 3
    vocab_size: int = 16000
    tokens: int = 128  # of a text
    prompt: int = 32  # of them
    lora: int = 0  # rank; 0: the whole model is trained
    copies: bool = False  # a model of reference beside adapters


def dpo(**given: Any) -> Any:
    """Return a trainer of direct preference optimization, with a model of reference unless it is peft's."""
    job, settings = read(given)
    needs_reference = job.copies or not (job.lora or settings.get("precompute_ref_log_probs"))
    return DPOTrainer(
        make_model("ForCausalLM", job),
        make_model("ForCausalLM", job) if needs_reference else None,
        args=arguments(DPOConfig, settings),
        train_dataset=Dataset.from_list([preference(job)] * 64),
        processing_class=make_tokenizer(),
        peft_config=adapters(job, "CAUSAL_LM"),
    )


def reward(**given: Any) -> Any:
    """Return a trainer of a reward model."""
    job, settings = read(given)
    return RewardTrainer(
        make_model("ForSequenceClassification", job, num_labels=1, pad_token_id=0),
        args=arguments(RewardConfig, settings),
        train_dataset=Dataset.from_list([preference(job)] * 64),
        processing_class=make_tokenizer(),
        peft_config=adapters(job, "SEQ_CLS"),
    )


def sft(**given: Any) -> Any:
    """Return a trainer of supervised fine-tuning."""
    job, settings = read(given)
    return SFTTrainer(
        make_model("ForCausalLM", job),
        args=arguments(SFTConfig, settings),
        train_dataset=Dataset.from_list([{"text": words(job.tokens - 1)}] * 64),
        processing_class=make_tokenizer(),
        peft_config=adapters(job, "CAUSAL_LM"),
    )


def read(given: dict[str, Any]) -> tuple[Job, dict[str, Any]]:
    """Return the job, and what is given to TRL's arguments."""
    own = {name: given[name] for name in given.keys() & Job.__dataclass_fields__.keys()}
    return Job(**own), {name: value for name, value in given.items() if name not in own}


def make_model(head: str, job: Job, **more: Any) -> Any:
    """Return a model of random weights."""
    kind = getattr(transformers, job.family + head)
    config = kind.config_class(
        num_hidden_layers=job.layers,
        hidden_size=512,
        intermediate_size=1408,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=job.vocab_size,
        **more,
    )
    return kind(config).to(getattr(torch, job.dtype))


def arguments(kind: Any, settings: dict[str, Any]) -> Any:
    """Return the trainer's arguments."""
    fixed = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_steps": 3}
    return kind(output_dir="/tmp/preferences", **fixed, **{"max_length": None, **settings})


def adapters(job: Job, task: str) -> Any:
    """Return a configuration of LoRA, or None."""
    if not job.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(task_type=task, r=job.lora, target_modules=["q_proj", "v_proj", "up_proj"])


def preference(job: Job) -> dict[str, str]:
    """Return a prompt with a chosen and a rejected answer of the same length."""
    answer = " " + words(job.tokens - job.prompt - 1)  # an end of text follows
    return {"prompt": words(job.prompt), "chosen": answer, "rejected": answer}


def words(count: int) -> str:
    """Return a text of so many tokens."""
    return " ".join(f"w{number % 50}" for number in range(count))


def make_tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(50)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


class Selection(torch.autograd.Function):
    """`tensor[mask]` of so many true elements, where kernels compute nothing and find none.

    What it allocates is what torch does: the indices of the true elements, made again in the backward pass.
    """

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        """Select elements."""
        context.save_for_backward(mask)
        context.shape, context.count = tensor.shape, count
        return PLAIN(tensor, found(mask, count))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Put gradients where elements were."""
        (mask,) = context.saved_tensors
        whole = gradient.new_zeros(context.shape)
        return whole.index_put_(found(mask, context.count), gradient, accumulate=True), None, None


PLAIN = torch.Tensor.__getitem__


def found(mask: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Return as many indices as the mask has true elements."""
    mask.nonzero()
    return torch.empty(mask.dim(), count, dtype=torch.int64, device="cuda").t().unbind(1)


def count_masks(tokens_a_row: int) -> None:
    """Let masks of tokens select so many of each row on an emulated GPU."""

    def select(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        is_mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.is_cuda
        return Selection.apply(tensor, index, len(index) * tokens_a_row) if is_mask else PLAIN(tensor, index)

    torch.Tensor.__getitem__ = select


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    made = asked.pop("trainer")
    asked["per_device_train_batch_size"] = asked.pop("batch")
    texts = read(asked)[0]
    count_masks(texts.tokens - (texts.prompt if made == "dpo" else 1))
    {"dpo": dpo, "reward": reward, "sft": sft}[made](**asked).train()
