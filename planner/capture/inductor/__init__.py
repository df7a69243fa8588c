"""torch.compile's own pipeline on tensors on `meta`, for the planned GPU."""
