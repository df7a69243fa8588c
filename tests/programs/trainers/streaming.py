"""Language modelling on a stream: an iterable dataset without a length."""

from datasets import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator


def texts():
    while True:
        yield {"input_ids": [1] * 32, "labels": [1] * 32}


def make_trainer():
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=200))
    args = TrainingArguments("out", max_steps=100, bf16=True, gradient_accumulation_steps=2, report_to="none")
    stream = IterableDataset.from_generator(texts)
    return Trainer(model, args, train_dataset=stream, data_collator=default_data_collator)
