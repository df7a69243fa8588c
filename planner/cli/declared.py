"""Options that stand in several groups: each is declared here, and its group names it."""

from typing import Annotated

from planner.cli.words import Option

Catalogue = Annotated[
    str | None, Option(metavar="FILE", help="A catalogue in place of the planner's models.yaml.")
]
AllowCode = Annotated[
    bool, Option("--allow-code", help="Let these files name code that runs: FILE.py:NAME.")
]  # of a command that reads a file besides --models
Isolate = Annotated[
    bool, Option("--isolate", help="Run the model in a process of its own, whatever it does there.")
]
TimeLimit = Annotated[
    str | None, Option(metavar="SECONDS", help="What a trace may take with --isolate; 600 by default.")
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
    Option(
        metavar="N", help="A bound on the caching allocator alone, as set_per_process_memory_fraction sets."
    ),
]
AllocConf = Annotated[
    str | None, Option(metavar="TEXT", help="PYTORCH_ALLOC_CONF, such as expandable_segments:True.")
]
Confidence = Annotated[
    str | None, Option(metavar="P", help="The answer holds with this probability; 0.99 by default.")
]
