"""The memory that kernels request: convolutions, cuBLAS, and their order in a trace."""
