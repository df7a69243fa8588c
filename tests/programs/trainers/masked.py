"""Masked language modelling with the library's own collator, which draws random numbers."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
)


def make_trainer():
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<mask>": 1, "<unk>": 2, "a": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", mask_token="<mask>", unk_token="<unk>"
    )
    rows = Dataset.from_dict({"text": ["a a a", "a " * 20]}).map(
        lambda row: tokenizer(row["text"]), remove_columns=["text"]
    )
    config = RobertaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    args = TrainingArguments("out", report_to="none")
    collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.15)
    return Trainer(
        RobertaForMaskedLM(config),
        args,
        data_collator=collator,
        train_dataset=rows,
        processing_class=tokenizer,
    )
