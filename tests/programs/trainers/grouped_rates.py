"""Two learning rates: `create_optimizer` overridden, and frozen embeddings."""

import torch
from transformers import RobertaConfig, RobertaForSequenceClassification, Trainer, TrainingArguments


class GroupedTrainer(Trainer):
    def create_optimizer(self, *args, **kwargs):
        head = [p for n, p in self.model.named_parameters() if "classifier" in n and p.requires_grad]
        body = [p for n, p in self.model.named_parameters() if "classifier" not in n and p.requires_grad]
        self.optimizer = torch.optim.AdamW([{"params": body, "lr": 1e-5}, {"params": head, "lr": 1e-3}])
        return self.optimizer


def make_trainer():
    config = RobertaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    model = RobertaForSequenceClassification(config)
    for parameter in model.roberta.embeddings.parameters():
        parameter.requires_grad = False
    rows = [{"input_ids": [5] * 20, "attention_mask": [1] * 20, "label": 1}] * 8
    args = TrainingArguments("out", per_device_train_batch_size=4, max_grad_norm=0.5, report_to="none")
    return GroupedTrainer(model=model, args=args, train_dataset=rows)
