"""Outputs of frequent operators, fast and laid out as CUDA's kernels do."""
