"""Simulate torch's devices: names, moves, queries, and which tensors are on the GPU or the host."""
