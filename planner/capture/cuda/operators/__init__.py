"""Run operators on meta tensors with the allocations that they make on CUDA."""
