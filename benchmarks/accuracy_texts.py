"""The sentences of docs/accuracy.md that hold no figures."""

HEAD = """\
# How accurate the answers are

Written by `python benchmarks/accuracy.py`; every number below comes from
[benchmarks/accuracy.csv](../benchmarks/accuracy.csv), one row for each known truth. All truths were
measured by others, on GPUs that this project never had; nothing measured enters a replay, and no constant
is fitted to a peak. Origins and loops: [benchmarks/published/README.md](../benchmarks/published/README.md)
and `planner/measured`.

An error is (ours - measured) / measured: below zero too little memory is promised, which is what kills
runs.
"""
PEAKS = """\
xMem's truth is the process's peak by NVML over its first sample: reserved memory and what CUDA loads
lazily, without the context. Of CNNs the first sample holds model and optimizer (`published_outcomes.py`
says what shows it), so their memory is taken off our figure, and off those of the closed formula, torchinfo
and MemTracker. Nothing is added for lazy loading. xMem's and DNNMem's own answers include memory that was
measured in the very run.

Layer A, the allocator's replay of a recorded history, has no row: no allocator history of a GPU is at hand.
What stands in for it are the layers above it, and a second, dumb allocator that the tests hold the
simulator against. The notebook's reserved memory (C) is that of a process bounded by the card as the
notebook shows it; its UNETR is far off because the segments of the models before it are released or not by
what else is on the GPU.
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
with zeros and kept, unfused attention, the optimizer a loop over parameters. Torch 1.10's softmax kept its
input beside its result (pytorch/pytorch#49600, #65242): `ours` knows it, the next column is the loop as
today's torch runs it. 8-bit Adam is no optimizer of the planner, so its two points are left out. ViT-L/16:
`max_memory_reserved`, zero_grad between forward and backward pass, an evaluation pass in the loop, all as
today's torch runs it.
"""
PROBABILITY = """\
`P(out of memory)` and `--confidence` rest on the residuals of these runs, which stand in
`planner/residuals.json`: (memory that a run needs) / (memory that its replay needs) is taken as normal,
fitted to the outcomes under caps (the mean over all distributions, by likelihood), for fixed samples and
for texts apart, and joined with what is uncertain about context and driver. Each model below is judged by
a distribution fitted to the other models alone; timm's by that of the CNNs, with as wide a doubt about
what lies outside the allocator as its published figures differ. The upper bound of a peak is a quantile
of measured over replayed peaks; with a calibration, it is the prediction bound of the line through the
other batch sizes.
"""
CALIBRATED = """\
Jobs that were measured at four batch sizes or more on one card: each batch size as the line through the
others tells it, and as the replay tells it alone, both against the peak with the memory of model and
optimizer in it.
"""
