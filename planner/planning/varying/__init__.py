"""Plan batches whose samples have many sizes, by replaying sampled batches through one allocator."""
