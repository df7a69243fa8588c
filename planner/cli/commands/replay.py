"""The command `planner replay`."""

from typing import Annotated, Any

from typer import Argument

from planner.cli.options import (
    JOB,
    AllocConf,
    AllowCode,
    Answer,
    Catalogue,
    GpuMib,
    option,
    option_flag,
    with_options,
)
from planner.errors import UsageError
from planner.jobs import shown
from planner.program import OnProgress

_SIMULATION = {
    "models": Catalogue,
    "allow_code": AllowCode,
    "gpu": Annotated[
        str | None, option("NAME", "A GPU such as 'RTX 4090' or L4; by default one of unlimited memory.")
    ],
    "gpu_mib": GpuMib,
    "allocator_cap_mib": Annotated[
        int | None, option("N", "Memory left for the caching allocator, as when others use the GPU too.")
    ],
    "alloc_conf": AllocConf,
    "cudnn": JOB["cudnn"],
}


@with_options(_SIMULATION)
def replay_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    framework: Annotated[
        str | None,
        option(
            "NAME", "torch (the default), or tensorflow, which measures plain tensors on this machine's GPU."
        ),
    ],
    process: Annotated[
        str | None,
        Argument(
            metavar="FILE",
            help="A process in YAML, or an included one: notebook (the default) or variable.",
        ),
    ],
) -> Answer:
    """Replay a sequence of steps, and print the memory at each of its print steps."""
    from planner.api.replay import NOTEBOOK, VARIABLE, measure_process, replay_process

    if framework not in (None, "torch", "tensorflow"):
        raise UsageError(f"--framework: unknown value {shown(framework)}; use one of torch, tensorflow")
    given = [name for name, value in options.items() if value is not None]
    if framework == "tensorflow" and given:
        raise UsageError(f"{option_flag(given[0])} and --framework tensorflow, which measures; remove one")
    if framework == "tensorflow":
        result = measure_process(VARIABLE if process is None else process)
    else:
        source = NOTEBOOK if process is None else process
        result = replay_process(source, on_progress=on_progress, **options)
    return result, result.ran_to_its_end
