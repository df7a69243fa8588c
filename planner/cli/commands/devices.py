"""`planner devices`."""

from dataclasses import dataclass
from typing import Annotated

from planner.cli.options import OutputOptions, takes
from planner.cli.output import answer
from planner.cli.words import Argument
from planner.hardware import Device
from planner.report import Result


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Which cards."""

    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[WORDS]...",
            help="Each is found in a card's name, aliases, line (consumer, workstation, datacenter, slice), "
            "memory or cloud instances, or is its compute capability; auto: this machine's card.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class DevicesResult(Result):
    """What was found."""

    devices: tuple[Device, ...]


@takes(SearchOptions, OutputOptions)
def devices_command(search: SearchOptions, output: OutputOptions) -> int:
    """List the known GPUs, each figure with its source."""
    from planner.hardware import load_devices, local_device, search_devices

    words = list(search.words or ())
    found = (local_device(),) if words == ["auto"] else search_devices(load_devices(), words)
    answer(DevicesResult(found), output)
    return 0 if found else 1
