"""A reward model with TRL's RewardTrainer."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer


def make_trainer():
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=100,
        num_labels=1, pad_token_id=0,
    )  # fmt: skip
    rows = Dataset.from_list([{"chosen": "a a a a", "rejected": "a a"}] * 4)
    args = RewardConfig("out", bf16=False, gradient_checkpointing=False, report_to="none")
    return RewardTrainer(
        LlamaForSequenceClassification(config), args=args, train_dataset=rows, processing_class=tokenizer
    )
