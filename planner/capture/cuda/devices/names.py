"""Tell the devices apart that arguments of torch's functions name."""

import torch


def names_gpu(device: object) -> bool:
    """Return whether a device argument (a name, `torch.device` or index) means a GPU."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def names_cpu(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cpu"
