"""Run operators on `meta` quickly, with outputs laid out as by CUDA's kernels."""
