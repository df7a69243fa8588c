"""Record the allocations of a loop, by operator and module."""
