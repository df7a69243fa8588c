"""Supervised fine-tuning of adapters with TRL's SFTTrainer, whose texts a function makes."""

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def make_trainer():
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = MistralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=100,
    )  # fmt: skip
    rows = Dataset.from_list([{"question": "a a", "answer": "a a a"}] * 4)
    args = SFTConfig(
        "out", per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=False,
        max_length=64, report_to="none",
    )  # fmt: skip
    return SFTTrainer(
        MistralForCausalLM(config), args=args, train_dataset=rows, processing_class=tokenizer,
        formatting_func=lambda row: f"{row['question']} {row['answer']}",
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
