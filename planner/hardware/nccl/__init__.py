"""Compute NCCL's memory, which is outside of torch's allocator."""
