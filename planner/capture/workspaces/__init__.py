"""Define rules for the workspaces of CUDA kernels."""
