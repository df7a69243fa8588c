"""The command `planner devices`."""

from dataclasses import dataclass
from typing import Annotated

from typer import Argument

from planner.cli.options import Answer, with_options
from planner.hardware import Device
from planner.report import Report, Result, report_of


@dataclass(frozen=True, slots=True)
class DevicesResult(Result):
    """The GPUs that match the words of `planner devices`."""

    devices: tuple[Device, ...]

    def _report(self) -> Report:
        from planner.report import devices_document, devices_to_json

        return report_of(devices_document, devices_to_json, self.devices)


@with_options()
def devices_command(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[WORDS]...",
            help="Each is found in a GPU's name, aliases, maker, line (consumer, workstation, datacenter, "
            "slice), memory or cloud instances, or is its compute capability; auto: this machine's GPU.",
        ),
    ],
) -> Answer:
    """List the known GPUs, each figure with its source."""
    from planner.hardware import load_devices, load_other_devices, local_device, search_devices

    auto, known = words == ["auto"], (*load_devices(), *load_other_devices())
    devices = (local_device(),) if auto else search_devices(known, words or ())
    return DevicesResult(devices), bool(devices)
