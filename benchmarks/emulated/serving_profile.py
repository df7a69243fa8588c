"""The profile run of a server, in plain torch: tensors that live and die as in vLLM's layers of a decoder.

    planner run --gpu NAME --json -- python serving_profile.py --shape '{"hidden": 1024, ...}'

Keys of the shape are those of `ServedModel`. Attention is an empty output, as vLLM's profile run has no
cache to attend to; weights of one layer stand for all, since they are read alone.
"""

import argparse
import json

import torch
import torch.nn.functional as F


def normed(states, weight, residual=None):
    """Add and normalise in place, as fused_add_rms_norm does; without a residual, into a new tensor."""
    if residual is None:
        return torch.empty_like(states), states
    return states, residual


def run_layers(weights, states, layers, widths):
    """Return the last hidden states."""
    residual = None
    queries, keys, intermediate = widths
    for _ in range(layers):
        states, residual = normed(states, weights["norm"], residual)
        qkv = F.linear(states, weights["qkv"])
        attended = torch.empty(len(states), queries, dtype=states.dtype, device=states.device)
        states = F.linear(attended, weights["out"])
        del qkv, attended
        states, residual = normed(states, weights["norm"], residual)
        both = F.linear(states, weights["gate_up"])
        product = torch.empty(len(states), intermediate, dtype=states.dtype, device=states.device)
        del both
        states = F.linear(product, weights["down"])
        del product
    return normed(states, weights["norm"], residual)[0]


def sample(weights, states, rows):
    """Return a token for each row, from logits, their copy in float32, probabilities and random numbers."""
    logits = F.linear(states[:rows], weights["head"])
    copied = logits.to(torch.float32)
    probabilities = copied.softmax(-1)
    noise = torch.empty_like(probabilities).exponential_()
    return probabilities.div_(noise).argmax(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", type=json.loads)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=256)
    args = parser.parse_args()
    shape = args.shape
    hidden, queries, keys, inner = (shape[one] for one in ("hidden", "queries", "keys", "intermediate"))
    sizes = {
        "norm": (hidden,),
        "qkv": (queries + keys, hidden),
        "out": (hidden, queries),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (shape["vocabulary"], hidden),
    }
    weights = {name: torch.empty(size, dtype=torch.bfloat16, device="cuda") for name, size in sizes.items()}
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        states = torch.empty(args.tokens, hidden, dtype=torch.bfloat16, device="cuda")
        states = run_layers(weights, states, shape["layers"], (queries, keys, inner))
        layers = torch.cuda.max_memory_allocated() - held
        torch.cuda.reset_peak_memory_stats()
        sample(weights, states, args.rows)
    print(json.dumps({"layers": layers, "sampler": torch.cuda.max_memory_allocated() - held}))


if __name__ == "__main__":
    main()
