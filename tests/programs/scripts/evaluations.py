"""Train with evaluations by a Trainer of transformers: small models without weights, all samples of one size.

    python evaluations.py '{"trainer": "tokens", "batch": 4, "eval_samples": 64, "bf16": true, ...}'

Keywords beside those of `Job` are those of TrainingArguments. It evaluates after the second of three steps.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments


@dataclass(frozen=True)
class Job:
    """Samples and what of their predictions is kept."""

    tokens: int = 128  # of a text
    eval_tokens: int = 128
    eval_samples: int = 64
    datasets: int = 1  # of evaluations
    metrics: bool = True
    best: bool = False  # metrics are of the best class alone, by `preprocess_logits_for_metrics`


class Samples(Dataset):
    """So many samples of one size."""

    def __init__(self, sample: dict[str, torch.Tensor], count: int) -> None:
        self.sample, self.count = sample, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.sample


def tokens(**given: Any) -> Trainer:
    """Return a trainer that gives each token of a text a class."""
    job, settings = read(given)
    config = transformers.BertConfig(
        num_hidden_layers=3, hidden_size=256, num_attention_heads=4, vocab_size=5000, num_labels=300
    )
    model = transformers.BertForTokenClassification(config)
    return trainer(model, job, settings, lambda count: labelled(count, (count,)))


def language(**given: Any) -> Trainer:
    """Return a trainer of a causal language model."""
    job, settings = read(given)
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        hidden_size=256,
        intermediate_size=704,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4000,
    )
    model = transformers.LlamaForCausalLM(config)
    return trainer(model, job, settings, lambda count: labelled(count, (count,)))


def images(**given: Any) -> Trainer:
    """Return a trainer of an image classifier."""
    job, settings = read(given)
    config = transformers.ViTConfig(
        num_hidden_layers=3, hidden_size=192, intermediate_size=768, num_attention_heads=3, num_labels=1000
    )
    sample = {"pixel_values": torch.zeros(3, 224, 224), "labels": torch.tensor(0)}
    return trainer(transformers.ViTForImageClassification(config), job, settings, lambda count: sample)


def texts(**given: Any) -> Trainer:
    """Return a trainer of a model that writes texts, and generates them when it evaluates."""
    job, settings = read(given)
    config = transformers.T5Config(
        d_model=256, d_ff=1024, num_layers=4, num_heads=4, d_kv=64, vocab_size=8000, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config)
    return trainer(
        model, job, {**settings, "predict_with_generate": True}, lambda count: labelled(count, (64,))
    )


def trainer(model: Any, job: Job, settings: dict[str, Any], sample_of: Any) -> Trainer:
    """Return a trainer that evaluates after its second step."""
    fixed = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_steps": 3}
    generates = "predict_with_generate" in settings
    arguments = (Seq2SeqTrainingArguments if generates else TrainingArguments)(
        output_dir="/tmp/evaluations", eval_strategy="steps", eval_steps=2, **fixed, **settings
    )
    evaluated = Samples(sample_of(job.eval_tokens), job.eval_samples)
    several = {f"part{number}": evaluated for number in range(job.datasets)}
    given: dict[str, Any] = {
        "train_dataset": Samples(sample_of(job.tokens), 1024),
        "eval_dataset": several if job.datasets > 1 else evaluated,
        "compute_metrics": (lambda predictions: {}) if job.metrics else None,
        "preprocess_logits_for_metrics": (lambda logits, labels: logits.argmax(-1)) if job.best else None,
    }
    if generates:
        return Seq2SeqTrainer(model, arguments, **given)
    return Trainer(model, arguments, **given)


def labelled(count: int, labels: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return a text with its labels."""
    zeros = torch.zeros(count, dtype=torch.int64)
    return {
        "input_ids": zeros,
        "attention_mask": torch.ones(count, dtype=torch.int64),
        "labels": torch.zeros(labels, dtype=torch.int64),
    }


def read(given: dict[str, Any]) -> tuple[Job, dict[str, Any]]:
    """Return the job, and what is given to the trainer's arguments."""
    own = {name: given[name] for name in given.keys() & Job.__dataclass_fields__.keys()}
    return Job(**own), {name: value for name, value in given.items() if name not in own}


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    from generate import end_by_length

    end_by_length()
    asked = json.loads(sys.argv[1])
    made = asked.pop("trainer")
    asked["per_device_train_batch_size"] = asked.pop("batch")
    {"tokens": tokens, "language": language, "images": images, "texts": texts}[made](**asked).train()
