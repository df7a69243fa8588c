"""Rules for the workspaces of kernels."""
