"""The memory that kernels request, such as workspaces of cuDNN and cuBLAS, and its events in a trace."""
