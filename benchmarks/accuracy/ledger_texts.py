"""The prose of docs/ledger.md."""

from benchmarks.accuracy.others import VERSIONS

HEAD = """\
# The ledger

Written by `python -m benchmarks.accuracy.ledger`: this planner and other tools on the same published runs.
Where another tool is better stands first. All truths were measured by others ([accuracy](accuracy.md) has
their sources, [benchmarks/published/README.md](../benchmarks/published/README.md) the loops); every figure
comes from [accuracy.csv](../benchmarks/accuracy/accuracy.csv),
[preflight.csv](../benchmarks/accuracy/preflight.csv), [others.csv](../benchmarks/accuracy/others.csv) and
[runs_torch26.csv](../benchmarks/published/runs_torch26.csv).

Two things favour the planner. It was developed against these runs, one of its constants was fitted to the
CNNs of the RTX 3060 ([accuracy](accuracy.md#the-headlines-twice) gives the errors without it, and those of
runs that were held out), and it was asked with all that a run's description says, where several of the
others have no option for it.
"""

ERRORS = """\
An error is (answer - measured) / measured. `ours` is of the same rows, those that the other tool answers.
What a truth does not hold is taken off an answer (the CUDA context that a tool adds, and of xMem's CNNs the
model and optimizer, which the first sample held), and where it holds the context and a tool counts none,
the measured one is added.
"""

OUTCOMES = """\
Runs under a cap of the allocator's memory, and on the whole card. A tool says that a run lives if its
estimate for it is at most the memory there is; for the planner the replay within that memory decides.
Counted are runs whose peak on the empty card was measured too, since the other tools' answers stand for
those. The caps of xMem's campaign are the answers of xMem, DNNMem, SchedTune and LLMem themselves, rounded
to 1 % of the card: for these four half of that is allowed. timm's 610 outcomes
([accuracy](accuracy.md#timms-brackets-the-largest-batch-that-trained)) were put to the planner alone.
"""

SECONDS = """\
Wall times that xMem's artifact has for these runs, on its authors' machines; xMem runs iterations of the
model on the CPU.
"""

SECONDS_HERE = """
Timed for this page ([seconds.csv](../benchmarks/accuracy/seconds.csv)): three of xMem's CNNs, one run of
each, asked three times in one process on two CPU cores, after an answer for its fourth CNN, so that imports
do not count. The planner had no cache; [speed](speed.md) has its other times. torchinfo and the
closed formula count layers, and were not timed; fitcheck answers for none of these runs.
"""

REFUSALS = """\
What each tool was asked, and why it has no answer, where it has any in its own words. fitcheck was told the
number of parameters that the model has, in place of the Hub's.
"""

TOOLS = f"""\
- **xMem**, **DNNMem**, **SchedTune**, **LLMem**: answers published with the runs (Stone-ResearchLife/xMem);
  they were not run here.
- **torch-preflight** 0.5.0, by the name of a model in its snapshot, and by a constructor that it runs on
  meta.
- **MemTracker**: `torch.distributed._tools.mem_tracker` of torch 2.13, run by `planner estimate --method
  memtracker`; likewise **torchinfo** 1.8.0 and the **closed formula** of data, weights, outputs, gradients
  and moments.
- **kitsune**: torch-kitsune {VERSIONS["torch-kitsune"]} of PyPI (jeeth-kataria/Kitsune_optimization),
  `predict_memory`. The package `kitsune` of PyPI counts k-mers of genomes. Asked with models
  on meta, for one and two samples, between which its figures are linear.
- **fitcheck**: fitcheck-llm {VERSIONS["fitcheck-llm"]} of PyPI, for LoRA, QLoRA and full fine-tuning of
  language models whose MLP has three matrices, as Llama's; the package `fitcheck` of PyPI is about job
  postings. It refuses all of these runs, which are of other models. It was not asked for the runs of
  Llama 3 that peft and torchtune published ([fine-tuning](finetuning.md)): lengths vary in the ones, in most
  of the others graphs are compiled and losses are split, and it has no option for either.
- **accelerate** {VERSIONS["accelerate"]}: the calculation of `accelerate estimate-memory`
  (`calculate_maximum_sizes`, `estimate_training_usage`) on a model on meta, since its own command looks for
  names on a hub. It knows no batch size, and says so: its figure is for Adam and a batch of one.
"""
