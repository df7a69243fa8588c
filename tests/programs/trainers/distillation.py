"""Distillation: a second model that the trainer keeps and calls without gradients."""

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class DistillationTrainer(Trainer):
    def __init__(self, *args, teacher, temperature=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher.to(self.args.device).eval()
        self.temperature = temperature

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            teacher = self.teacher(**inputs).logits
        soft = F.kl_div(
            F.log_softmax(outputs.logits / self.temperature, dim=-1),
            F.softmax(teacher / self.temperature, dim=-1),
            reduction="batchmean",
        )
        loss = 0.5 * outputs.loss + 0.5 * soft * self.temperature**2
        return (loss, outputs) if return_outputs else loss


def bert(layers):
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=64,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=100,
        )
    )


def make_trainer():
    rows = [{"input_ids": [5] * 20, "attention_mask": [1] * 20, "labels": 1}] * 8
    args = TrainingArguments("out", per_device_train_batch_size=4, report_to="none")
    return DistillationTrainer(bert(1), args, train_dataset=rows, teacher=bert(3))
