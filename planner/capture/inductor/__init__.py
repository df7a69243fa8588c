"""Run torch.compile's own pipeline on `meta` tensors for the planned GPU."""
