"""NCCL's memory, which lies outside of torch's allocator."""
