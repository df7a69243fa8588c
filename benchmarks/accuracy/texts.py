"""The sentences of docs/accuracy.md that hold no figures."""

HEAD = """\
# How accurate the answers are

Written by `python -m benchmarks.accuracy`. All truths here were measured by others, on GPUs that this project
did not have: first what allocators of GPUs recorded, event by event, then published peaks and outcomes. What
it measured itself, on one H200, has [a page of its own](measured.md).
"""
FITTED = """\
## Published peaks and outcomes

Every number from here on comes from
[benchmarks/accuracy/accuracy.csv](../benchmarks/accuracy/accuracy.csv), one row for each known truth.
Origins and loops: [benchmarks/published/README.md](../benchmarks/published/README.md) and
`planner/planning/estimators/measurements`.

What is fitted to measurements:

- One term of the replay: cuDNN's workspace for weight gradients of pointwise convolutions that widen the
  channels, on compute capability 8.6 only. Its form is that of newer versions ([cudnn.md](cudnn.md)); one
  constant, the longest sum, comes from peaks of the RTX 3060 below (`planner/hardware/cudnn/published.py`,
  `benchmarks/fits/convolution_workspaces.py`). Everything else in a replay follows from PyTorch's sources.
- What lies around it: the CUDA context (`benchmarks/fits/cuda_context.py`), what the driver keeps of a card
  (`benchmarks/fits/generic_device.py`), margins and probabilities (below).

[The headlines twice](#the-headlines-twice) gives the figures without the first, and with the product's own
settings.

An error is (ours - measured) / measured: below zero too little memory is promised, which is what kills
runs.
"""
PEAKS = """\
xMem's truth is the process's peak by NVML over its first sample: reserved memory and what CUDA loads
lazily, without the context. Of CNNs the first sample holds model and optimizer (shown in
`benchmarks/published/outcomes.py`), so their memory is taken off our figure, and off those of the closed
formula, torchinfo, MemTracker and torch-preflight. Nothing is added for lazy loading. xMem's and DNNMem's
own answers include memory that was measured in the very run.

Layer A, the allocator's replay of a recorded history, stands [above](#measured-the-allocator-event-by-event).
Histories of emulated GPUs, whose allocator is the real one, are replayed in [exactness.md](exactness.md),
and a second, dumb allocator is what the tests hold the simulator against. The notebook's reserved memory
(C) is that of a process bounded by the card as the notebook shows it; its UNETR is far off because the
segments of the models before it are released or not by what else is on the GPU.
"""
BESIDE = """\
The first three know no allocator; on the T4 they stand beside peak allocated, and so does `ours`. They know
no autocast either, which the T4's runs have.
torch-preflight (PyPI, 0.5.0; run by `benchmarks/accuracy/preflight.py`) projects the peak of the process;
what a truth does not hold is taken off: of xMem's and ViT-L's the context, of the notebook's also the
fragmentation, of xMem's CNNs the first sample as above. bert-large has the empty context of its machine.
By name: the model is in torch-preflight's snapshot of architectures. On meta: torch-preflight calls the
model's constructor, runs it forward, and counts tensors saved for the backward pass, which misses the loss of
language models; T5 does not run that way. torch-preflight's constants for fragmentation and context come from
these very runs of a T4, for which its documentation states a mean absolute error of 3.7%.
"""
OPERATORS = """\
Liger (linkedin/Liger-Kernel) measured its kernels against plain PyTorch: `max_memory_allocated` of one pass
after others, inputs, weights and gradients of the passes before included, and Liger's own module with its
weights. `benchmarks/accuracy/operators.py` has the plain side as small modules, recorded in the loop of
`operator_loop.py`. The source states no version of torch; ours is the newest known.
"""
KERNELS = """\
The same scripts measured Liger's kernels in Triton, and tiles and layers of DeepSpeed and Megatron.
`benchmarks/accuracy/kernels.py` calls Liger's modules as those scripts do; a kernel launches nothing in a
plan, and what its Python code allocates is recorded. Each row has the release of its day, or the first with
its operator (`benchmarks/accuracy/liger_releases.py`); the last column but one is by today's, which
allocates otherwise in some. Compiled chunks are planned by today's inductor, convolutions by cuDNN 9.20. The
vectors of softmax and squared ReLU have 0.5 to 16 KiB, so that the rounding of the published figures decides.
"""
HELD = """\
The losses over pairs of texts run in chunks that Liger compiles. In emulated runs of their passes with torch
2.5.1 (`benchmarks/accuracy/preference_process.py`), each of the first two compilations left a cycle of
references to a run's weights and inputs, which lived until Python collected it. The cycle of the second is
2,084.05 MiB, of 4,096 tokens 2,324.19 MiB, by which the published peaks exceed the plans of plain PyTorch and
of Liger alike, so that we take the process not to have been collected. Which cycles stay depends on Python's
collector: the script as it stands keeps two of them for ORPO and another amount for CPO, and the one was
taken because it is what the published peaks exceed the plans by. A plan of the operator has no process before
it; the last line of both tables adds what was held and is no test of the planner. KTO's and the
distillation's exceed their plans likewise, by amounts that an emulated run did not give.
"""
COLLECTION = """\
Each row of torchtitan, torchtune, peft and Liger that was collected is counted here: reproduced, with its
error, or left out, with the cause (`benchmarks/published/finetuning_rows.csv`, `liger_operators.csv`).
Liger's are the two tables below together, peft's images in [finetuning.md](finetuning.md#published-runs).
"""
TERMS = """\
Median and 95th percentile of the absolute error of xMem's peaks, outcomes under caps called right, timm's
brackets inside, and the notebook's peak allocated (median absolute error). An empty cell: the term has no
part in it. Context and driver have no part in xMem's truths; timm's brackets above show what the context is
worth.
"""
POINTS = """\
The notebook as one process: what earlier models leave behind counts on both sides. bert-large: nvidia-smi,
with the 1,343 MiB that an empty context took on that machine; Trainer's loop with gradients clipped, filled
with zeros, unfused attention, the optimizer a loop over parameters. Torch 1.10's softmax saved its
input beside its result (pytorch/pytorch#49600, #65242): `ours` knows it, the next column is the loop as
today's torch runs it. 8-bit Adam is no optimizer of the planner, so its two points are left out. ViT-L/16:
`max_memory_reserved`, zero_grad between forward and backward pass, an evaluation pass in the loop, all as
today's torch runs it. T4: torch 2.11, weights in float32, autocast to bfloat16 (which a T4 only emulates, so
that attention is unfused), AdamW, the peaks of one step after another, in the loop that was measured
(benchmarks/emulated/t4_loop.py); the published bytes are exact, and the process is reserved and context.
torchtune: its modules of autumn 2024 redone in plain PyTorch (`benchmarks/accuracy/torchtune_llama.py`), with
the fused attention kernel in place of its compiled flex_attention, which keeps the same tensors. Each row of
3B adds to the one before (`benchmarks/accuracy/torchtune_steps.py`), those of 8B are configurations of the
day. What is compiled is planned by today's inductor, NF4 and 8-bit state by today's torchao; bitsandbytes'
paged state has scales for 2,048 numbers, as before 0.44.
torchtitan: Llama 3.1 8B on 8 to 128 GPUs, 70B on 256 (`benchmarks/accuracy/torchtitan_steps.py`), a rank by
today's FSDP2, inductor and torchao. A first plan was 5 % low; two settings were then read in its sources:
attention (flash; today's torch takes cuDNN's on an H100, whose output its policy does not save) and the
allocator's (its script for several nodes leaves segments as they are). Float8 was planned after the others,
once, with nothing adjusted.
"""
TWICE = """\
One workspace of cuDNN has a constant that is fitted to peaks of the RTX 3060, 26 of which have such
convolutions. What it is worth on runs that it was not fitted to: the constant fitted to the runs of the other
models, and none at all. MobileNetV2's runs leave it open between 2,853 and 4,167, and the middle is above
MNASNet's 3,393 at batch 377, which becomes the worst row. Whatever value is taken between the two, at most
one row of MNASNet is wrong, by 18 or 25 %, and the 95th percentile stays below 4 %.
"""
HELD_OUT = """\
timm ran torch 1.12, which loads all kernels at once; the product plans for today's torch, whose context
is smaller, so that at even odds its answers for those runs are too high. At confidence 0.99 its margins are
those of these very rows where convolutions are timed by cudnn.benchmark, and else rest on other runs.

Held-out runs of the maintainers, unseen while the planner was written: 1.9 %
median and 7.8 % at the 95th percentile for 66 other CNN peaks, 0.2 % and 4.5 % for 26 transformers on RTX
cards, 4.4 % and 8.9 % for 26 runs of billions of parameters on an A100, and 89 % of 120 brackets inside
at this benchmark's settings.
"""
PROBABILITY = """\
`P(out of memory)` and `--confidence` rest on parts, which stand in `planner/hardware/residuals.json`: the
CUDA context and the driver, each with its own deviation ([devices.md](devices.md)), and (memory that a run
needs) / (memory that its replay needs), which is taken as normal, fitted to outcomes (the mean over all
distributions, by likelihood) for each kind of runs apart. `planner/hardware/likeness.py` decides the kind
by the job's options and the operators of its trace:

- Where sizes are fixed and a cuDNN answers for the convolutions, the replay is an emulated run's, to the
  byte in nearly all jobs ([exactness.md](exactness.md)), whatever the precision, the memory format and the
  GPU. What is left is how a real GPU differs from an emulated one: eight peaks of a T4, as Student's
  distribution about no difference predicts the next. timm's transformers, to which nothing of it is fitted,
  judge it below.
- Where something else is open (workspaces by a fitted term, cudnn.benchmark, lengths of texts), the
  distribution is that of published runs of the kind, which have all doubts in them.
- Stored answers in place of a cuDNN add the difference of needs from those by the library, one deviation
  for stored convolutions and one where some are answered by similar ones, images and volumes apart.
- What no measured run has adds the deviation between kinds and GPUs, in quadrature: a setting that no run
  of the kind had, another torch than the one whose cuDNN is stored, no backward pass, varying lengths,
  scratch memory that is not known; three-dimensional convolutions, convolutions over sequences and
  recurrent layers, which emulated runs alone show. The answer names them.
- Convolutions whose workspaces are not known add the difference of needs, and of peaks, by the library from
  those without workspaces, in proportion to their share of all convolutions by the sizes of their tensors,
  whatever their number; less where convolutions allocate less of what layers do than in any network that
  shows it, as in a transformer on patches.
- Sizes that depend on values as in detectors, and generation: there is no probability, and the margins
  are the widest of all kinds, wider by that deviation. DistributedDataParallel adds none, since its
  buckets are exact; NCCL's memory has a range of its own.

Each model below is judged by a distribution fitted to the other models alone; timm's by the other families.
timm's outcomes are taken with 1,690 MiB outside the allocator, so that the doubt about that figure is part
of their distributions; of fixed sizes a deviation of 192 MiB is stated for it, since others measured 1,690
MiB with CNNs on that stack and 1,024 with transformers; tresnet is left out, since timm 0.6 ran another
model. Repetitions of one job count once. Of billions of parameters only the two quantiles that the
maintainers published are known. The upper bound of a peak is a quantile of measured over replayed peaks,
and of kinds with fewer than 30 peaks no less than that of their normal distribution; with a calibration, it
is the prediction bound of the line through the other batch sizes.
"""
OUTSIDE = """\
Two classes lie outside, both of texts, of which only three models are known, each judged by the two others.
Of fifteen jobs that die with 4 % as stated, three do, all of t5-small: its runs need 1 % more than their
replays in the mean, those of the two decoders 1 to 2 % less. The other class is on the safe side: what lived
though it was stated to die is gpt-neo-125M at batches 20 and 25. A tenth to an eighth of what their replays
need is fragments between tensors, and these form otherwise where lengths vary: of five runs of one job under
one cap, four lived and one died.
"""
UNPUBLISHED = """\
How honest it is for a job that no run is like can be seen by taking each kind as unknown: its
outcomes judged by the distribution of plain CNNs, with the rule for departures alone.
"""
CALIBRATED = """\
Jobs that were measured at four batch sizes or more on one card: each batch size by the line through the
others, and by the replay alone, both against the peak with the memory of model and
optimizer in it.
"""
