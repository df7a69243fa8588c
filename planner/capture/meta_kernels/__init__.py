"""Run operators on `meta` quickly.

Outputs are laid out as by CUDA's kernels.
"""
