"""Plan jobs whose samples vary in size, by replaying sampled batches through one allocator."""
