"""Regression with samples that are dataclasses, as transformers' glue scripts had them, and float labels."""

from dataclasses import dataclass

from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments


@dataclass
class Features:
    input_ids: list
    attention_mask: list
    label: float


class MseTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = ((outputs.logits.squeeze(-1) - labels) ** 2).mean()
        return (loss, outputs) if return_outputs else loss


def make_trainer():
    config = DistilBertConfig(dim=64, hidden_dim=64, n_layers=1, n_heads=2, vocab_size=100, num_labels=1)
    rows = [Features([1] * 16, [1] * 16, 0.5) for _ in range(8)]
    args = TrainingArguments("out", remove_unused_columns=False, report_to=[])
    return MseTrainer(DistilBertForSequenceClassification(config), args, train_dataset=rows)
