"""Batches of samples of many sizes: a run of sampled batches through one allocator."""
