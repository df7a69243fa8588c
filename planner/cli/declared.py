"""Options that stand in several groups: each is declared here, and its group names it."""

from typing import Annotated

from planner.cli.words import Option

Catalogue = Annotated[
    str | None, Option(metavar="FILE", help="A catalogue instead of the planner's models.yaml.")
]
AllowCode = Annotated[
    bool, Option("--allow-code", help="Allow FILE.py:NAME, which runs code, in these files.")
]  # of a command that reads a file besides --models
Isolate = Annotated[bool, Option("--isolate", help="Run the model in a separate process.")]
TimeLimit = Annotated[
    str | None, Option(metavar="SECONDS", help="Time limit per trace with --isolate; 600 by default.")
]
MultipleOf = Annotated[
    str | None, Option(metavar="N", help="The largest batch that is a multiple of N.")
]  # of the commands that search
GpuMib = Annotated[
    str | None,
    Option(metavar="N", help="Any other GPU, by its total memory in MiB as nvidia-smi shows it."),
]
AllocatorCap = Annotated[
    str | None,
    Option(metavar="N", help="Limit of the caching allocator, as with set_per_process_memory_fraction."),
]
AllocConf = Annotated[
    str | None, Option(metavar="TEXT", help="Value of PYTORCH_ALLOC_CONF, such as expandable_segments:True.")
]
Confidence = Annotated[
    str | None, Option(metavar="P", help="Probability with which the answer holds; 0.99 by default.")
]
