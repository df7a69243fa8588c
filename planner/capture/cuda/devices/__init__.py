"""Answer for torch's devices: names, moves, queries, and which tensors lie on the GPU or on the host."""
