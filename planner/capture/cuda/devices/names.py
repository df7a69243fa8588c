"""Tell GPUs from other devices in arguments of torch's functions."""

import torch

# Torch's own code is told this device for meta tensors that stand for CPU tensors, and `meta` for tensors of
# the GPU. A tensor that is made on it is on `meta`.
HOST_DEVICE = torch.device("meta", 1)


def names_gpu(device: object) -> bool:
    """Return whether a device argument means a GPU. The argument is a name, a `torch.device` or an index."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return is_index(device)


def is_index(device: object) -> bool:
    """Return whether a device argument is an index of a GPU: any int that is not a bool."""
    return isinstance(device, int) and not isinstance(device, bool)


def names_cpu(device: object) -> bool:
    if device == HOST_DEVICE:
        return True
    return isinstance(device, str | torch.device) and torch.device(device).type == "cpu"
