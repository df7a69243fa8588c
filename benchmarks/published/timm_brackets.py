"""The loop in which timm found the largest batches of mixed-precision training, and the memory it had.

benchmarks/published/timm_train_rtx3090.csv has for each model and memory format a batch that trained and the
next larger candidate, which did not; its README gives the origin and the loop. Both ends of each bracket are
judged in benchmarks/accuracy.

The card is an RTX 3090 of which torch sees 24,268 MiB. What lies outside the allocator is no fact of the
runs. On that card and with torch 1.12, which loads all kernels at once, others measured 1,690 MiB while CNNs
trained with cudnn.benchmark, as here, and 1,024 MiB for transformers, which need no cuDNN
(context_overhead.csv of the same collection). Every model here begins with a convolution, so the verdicts are
those of 1,690; the share inside is stated for the other figure and the middle too.

The loop with today's torch: SGD in a loop over parameters, since `foreach` was opt-in in torch 1.12 (from
memory: the default on CUDA came with torch 2.0), gradients filled with zeros, and unfused attention in timm,
which had no other. Not reproduced: the lists of autocast, the formulas of autograd and the kernels are those
of the installed torch.
"""

import os
from pathlib import Path

os.environ["TIMM_FUSED_ATTN"] = "0"  # read when timm is imported

from planner.jobs import PUBLISHED, Job, MemoryFormat, Optimizer, OptimizerImpl, Precision, parse_tensor_spec

BRACKETS = Path(__file__).with_name("timm_train_rtx3090.csv")
TOTAL_MIB = 24_268
OUTSIDE_MIB = 1_690  # soodoshll/perfpred, scripts/mem/cnn.py, through context_overhead.csv
OTHER_OUTSIDE_MIB = (1_024, 1_357)  # the same source's for transformers, and the middle
AMPERE = (8, 6)


def job_of(bracket: dict[str, str]) -> Job:
    """Return the job of the loop that timm ran."""
    size = bracket["img_size"]
    return Job.create(
        model=f"timm:{bracket['model']}",
        inputs=(parse_tensor_spec(f"3x{size}x{size}"),),
        target=parse_tensor_spec("scalar:int64"),
        optimizer=Optimizer.NESTEROV,
        optimizer_impl=OptimizerImpl.FOR_LOOP,
        keep_grads=True,
        steps=2,  # from the second on, every step is like the one before
        precision=Precision.AMP_FP16,
        backward_in_autocast=True,
        memory_format=MemoryFormat(bracket["memory_format"]),
        cudnn_benchmark=True,
        cudnn=PUBLISHED,  # torch 1.12
    )
