"""Run operators on meta tensors quickly, with outputs laid out as by CUDA's kernels."""
