"""Build programs that hold for a range of batch sizes, from a few runs and symbolic workspace rules."""
