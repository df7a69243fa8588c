"""`planner devices`."""

from dataclasses import dataclass
from typing import Annotated, Any

from planner.cli.options import OutputOptions, takes
from planner.cli.output import answer
from planner.cli.words import Argument
from planner.hardware import Device


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
class Devices:
    """What was found."""

    devices: tuple[Device, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `planner devices`."""
        from planner.report.commands import devices_to_json

        return devices_to_json(self.devices)

    def __str__(self) -> str:
        from planner.report.commands import devices_text

        return devices_text(self.devices)

    def __rich__(self) -> object:
        from planner.report import devices_view

        return devices_view(self.devices)


@takes(SearchOptions, OutputOptions)
def devices_command(search: SearchOptions, output: OutputOptions) -> int:
    """List the known GPUs, each figure with its source."""
    from planner.hardware import load_devices, local_device, search_devices

    words = list(search.words or ())
    found = (local_device(),) if words == ["auto"] else search_devices(load_devices(), words)
    answer(Devices(found), output)
    return 0 if found else 1
