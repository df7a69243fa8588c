"""Functions that make a model's optimizers, as scripts have them."""

import torch
from torch import nn


def muon_and_adamw(model: nn.Module, lr: float = 0.02) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    matrices = [one for one in model.parameters() if one.ndim == 2]
    rest = [one for one in model.parameters() if one.ndim != 2]
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest)]


def without_decay_of_biases(model: nn.Module) -> torch.optim.Optimizer:
    """AMSGrad in two groups."""
    decayed = [one for one in model.parameters() if one.ndim > 1]
    rest = [one for one in model.parameters() if one.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, amsgrad=True)
