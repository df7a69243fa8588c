"""Plan batches whose samples have varying sizes, by replaying sampled batches through one allocator."""
