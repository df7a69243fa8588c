"""Generation by transformers' own `generate`, as a step: caches, beams and a model that assists."""

import argparse
import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList, utils as generation_utils

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}


class Generation:
    def __init__(self, layers=3, window=0, assisted=False, new_tokens=12, **options):
        sizes = {**SIZES, "num_hidden_layers": layers, "vocab_size": 8000}
        if window:
            model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes))
        self.model = model.to("cuda", dtype=torch.bfloat16).eval()
        self.options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, **options}
        self.options |= {"pad_token_id": 0, "disable_compile": True}
        self.assistant = None
        if assisted:
            small = LlamaForCausalLM(LlamaConfig(**{**sizes, "num_hidden_layers": 1}))
            self.assistant = small.to("cuda", dtype=torch.bfloat16).eval()
            drafts = self.assistant.generation_config
            drafts.assistant_confidence_threshold = 0.0  # no end by values
            drafts.num_assistant_tokens, drafts.num_assistant_tokens_schedule = 5, "constant"
            generation_utils._speculative_sampling = accept_none

    @torch.no_grad()
    def step(self, input_ids):
        mask = torch.ones_like(input_ids)
        mask[0, 0] = 0  # batches of texts are padded
        input_ids, mask = input_ids.to("cuda"), mask.to("cuda")
        more = {} if self.assistant is None else {"assistant_model": self.assistant}
        if self.assistant is not None:  # before the last token, which no draft precedes
            last = input_ids.shape[-1] + self.options["max_new_tokens"] - 1
            more["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(last)])
        return self.model.generate(input_ids, attention_mask=mask, **self.options, **more)


def accept_none(candidate_input_ids, candidate_logits, candidate_length, new_logits, **options):
    """Draw one token and accept none of the drafts: most steps, and no length that depends on values."""
    candidate_logits[:, -candidate_length:, :].softmax(dim=-1)
    token = torch.multinomial(new_logits.softmax(dim=-1)[:, 0, :], num_samples=1)
    return token, 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    generation = Generation(**args.options)
    for _ in range(args.steps):
        result = generation.step(torch.randint(8000, (args.batch_size, args.tokens)))
    print(result.shape)
