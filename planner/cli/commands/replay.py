"""`planner replay`."""

from dataclasses import dataclass
from typing import Annotated, Any

from planner.cli.declared import AllocConf, AllowCode, Catalogue, GpuMib
from planner.cli.options import OutputOptions, Text, takes, values_of
from planner.cli.output import answer, working
from planner.cli.words import Argument, Option
from planner.errors import UsageError
from planner.jobs import shown


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Which process, and on what."""

    process: Annotated[
        Text,
        Argument(
            metavar="FILE",
            help="A process in YAML, or an included one: notebook (the default) or variable.",
        ),
    ] = None
    models: Catalogue = None
    allow_code: AllowCode = False
    gpu: Annotated[
        Text,
        Option(metavar="NAME", help="A GPU such as 'RTX 4090' or L4; by default one of unlimited memory."),
    ] = None
    gpu_mib: GpuMib = None
    allocator_cap_mib: Annotated[
        Text,
        Option(metavar="N", help="Memory left for the caching allocator, as when others use the GPU too."),
    ] = None
    alloc_conf: AllocConf = None
    framework: Annotated[
        Text,
        Option(
            metavar="NAME",
            help="torch (the default), or tensorflow, which measures plain tensors on this machine's GPU.",
        ),
    ] = None

    def simulation(self) -> dict[str, Any]:
        """What `replay_process` takes besides the process."""
        given = values_of(self)
        del given["process"], given["framework"]
        return given


@takes(ReplayOptions, OutputOptions)
def replay_command(options: ReplayOptions, output: OutputOptions) -> int:
    """Replay a sequence of steps, and print the memory after each."""
    from planner.api.replay import NOTEBOOK, VARIABLE, measure_process, replay_process

    framework, simulation = options.framework or "torch", options.simulation()
    if framework not in ("torch", "tensorflow"):
        raise UsageError(f"--framework: unknown value {shown(framework)}; use one of torch, tensorflow")
    with working() as tell:
        if framework == "torch":
            source = options.process or NOTEBOOK
            result = replay_process(source, **simulation, tell=tell)
        else:
            given = [name for name, value in simulation.items() if value not in (None, False)]
            if given:
                option = given[0].replace("_", "-")
                raise UsageError(f"--{option} and --framework tensorflow, which measures; leave one away")
            result = measure_process(options.process or VARIABLE)
    answer(result, output)
    return 0 if result.ran_to_its_end else 1
