"""Write `planner/capture/meta_kernels/cuda_dtypes.json`: dtypes that CUDA's kernels refuse and `meta` takes.

    planner run --gpu "H100 80GB" -- python tools/store_cuda_dtypes.py

Runs PyTorch's own samples of its operators (`op_db`, which needs expecttest) with each dtype on `meta` and on
the GPU. An emulated GPU serves as well as a real one, since PyTorch chooses the kernel of a dtype on the CPU.
An operator's dtype is the one to which its operands promote; it is written down if the GPU refused every
sample of it, with the same words.
"""

import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.meta_kernels.operand_dtypes import DTYPES_FILE, NAMES, promoted

SAMPLES = 8  # of an operator and a dtype
DTYPES = [*NAMES]
_NAME = re.compile(rf"\b({'|'.join(NAMES.values())})\b")
_IS_ABOUT_DTYPES = re.compile("not implemented for|support|to have floating type")


# Counts of messages by operator and the dtype of its operands; "" where it ran.
Outcomes = defaultdict[tuple[str, torch.dtype], Counter[str]]


class Recorder(TorchDispatchMode):
    """A recorder of what becomes of each operator's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Outcomes = defaultdict(Counter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype, kwargs = promoted(args), kwargs or {}
        outcomes = self.found[str(func).removeprefix("aten."), dtype] if dtype in DTYPES else Counter()
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            outcomes[str(error).partition("\n")[0]] += 1
            raise
        outcomes[""] += 1
        return out


def samples(device: str) -> Iterator[tuple[Any, Any]]:
    """Yield each operator with its samples on a device."""

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    for op in op_db:
        for dtype in DTYPES:
            torch.manual_seed(0)
            with suppress(Exception):  # no sample of this dtype
                for sample in islice(op.sample_inputs("cpu", dtype), SAMPLES):
                    placed = sample.transform(moved)
                    if "device" in placed.kwargs:
                        placed.kwargs["device"] = device
                    yield op, placed


def outcomes(device: str) -> Outcomes:
    """Return what became of all samples on a device."""
    recorded = Recorder()
    for op, sample in samples(device):
        for function in filter(None, (op, op.inplace_variant)):
            with suppress(Exception), recorded:
                first = sample.input if function is op else sample.input.clone()
                function(first, *sample.args, **sample.kwargs)
    return recorded.found


def refusals() -> dict[tuple[str, ...], dict[str, list[str]]]:
    """Return operators by refused dtypes and message, in which `{}` stands for the dtype."""
    on_meta, on_gpu = outcomes("meta"), outcomes("cuda")
    refused: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for (op, dtype), found in on_gpu.items():
        is_refused = "" not in found and all(map(_IS_ABOUT_DTYPES.search, found))
        if is_refused and "" in on_meta.get((op, dtype), ()):
            message = _NAME.sub("{}", found.most_common(1)[0][0]).strip()
            refused[op, message].append(NAMES[dtype])
    groups: defaultdict[tuple[str, ...], dict[str, list[str]]] = defaultdict(dict)
    for (op, message), dtypes in sorted(refused.items()):
        groups[tuple(dtypes)].setdefault(message, []).append(op.removesuffix(".default"))
    return groups


def main() -> None:
    warnings.simplefilter("ignore")
    table = {
        " ".join(dtypes): {message: " ".join(ops) for message, ops in messages.items()}
        for dtypes, messages in refusals().items()
    }
    DTYPES_FILE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
