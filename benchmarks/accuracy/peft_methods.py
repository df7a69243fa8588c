"""Hold plans of peft's methods against the runs of its own comparison: Llama 3.2 3B on an L40S.

    python -m benchmarks.accuracy.peft_methods

Prints the table of docs/finetuning.md. The runs train on texts of varying lengths, four a batch. They record
the reserved memory of each step; its 99th percentile is that of the longest texts, whose length is the same
for all methods and not recorded. It is fitted to one of the runs, LoRA of rank 32, and the others are held
against the plan at that length.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import planner
from benchmarks.rows import read_lines
from planner.errors import PlannerError, UsageError

ROWS = Path(__file__).parents[1] / "published" / "peft_methods.csv"
FITTED = "lora--llama-3.2-3B-rank32"
GIB_IN_MIB = 1024
CONFIG: dict[str, Any] = {  # config.json of Llama 3.2 3B, as far as it decides memory
    "num_hidden_layers": 28, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
}  # fmt: skip


def reserved_gib(row: dict[str, str], tokens: int) -> float:
    """Return the planned peak of reserved memory of a run with texts of this length."""
    result = planner.estimate(
        "hf:LlamaForCausalLM", 4, gpu="L40S", model_arg=CONFIG, input=f"{tokens}:int64", precision="bf16",
        optimizer="adamw", clip_gradients="norm", peft=row["method"], peft_arg=row["arguments"].split(),
    )  # fmt: skip
    planned: float = result.to_dict()["peak_reserved_mib"]
    return planned / GIB_IN_MIB


def fitted_tokens(row: dict[str, str]) -> int:
    """Return the length at which the plan of a run is nearest to its record, to eight tokens."""
    published = float(row["train_reserved_p99_gib"])
    low, high = 256, 768  # the longest that the runs take
    while high - low > 8:
        middle = (low + high) // 2
        low, high = (middle, high) if reserved_gib(row, middle) < published else (low, middle)
    return min((low, high), key=lambda tokens: abs(reserved_gib(row, tokens) - published))


def print_rows(
    rows: Iterable[dict[str, str]], planned: Callable[[dict[str, str]], float], fitted: str = ""
) -> None:
    """Print a row for each run, and the errors of all runs but `fitted`."""
    print("| run | published GiB | planned GiB | error |\n|---|--:|--:|--:|")
    errors = []
    for row in rows:
        published = float(row["train_reserved_p99_gib"])
        try:
            if not row["method"]:
                raise UsageError("its configuration is not recorded, or not redone yet")
            plan = planned(row)
        except PlannerError as error:
            print(f"| {row['result']} | {published:.2f} | not planned: {str(error)[:80]} | |", flush=True)
            continue
        if row["result"] != fitted:
            errors.append(abs(plan / published - 1))
        print(f"| {row['result']} | {published:.2f} | {plan:.2f} | {plan / published - 1:+.1%} |", flush=True)
    p95 = quantiles(errors, n=20, method="inclusive")[-1]
    print(f"\n{len(errors)} runs: median {median(errors):.1%}, 95th percentile {p95:.1%}")


def main() -> None:
    """Print the table, at the length that is fitted to one run."""
    rows = read_lines(ROWS)
    tokens = fitted_tokens(next(row for row in rows if row["result"] == FITTED))
    print(f"length fitted to {FITTED}: {tokens} tokens\n")
    print_rows(rows, lambda row: reserved_gib(row, tokens), FITTED)


if __name__ == "__main__":
    main()
