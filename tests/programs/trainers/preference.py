"""Preferences with TRL's DPOTrainer and adapters."""

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer


def make_trainer():
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=100
    )
    rows = Dataset.from_list([{"prompt": "a a", "chosen": "a a a", "rejected": "a"}] * 4)
    args = DPOConfig("out", per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to="none")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return DPOTrainer(
        LlamaForCausalLM(config), args=args, train_dataset=rows, processing_class=tokenizer, peft_config=lora
    )
