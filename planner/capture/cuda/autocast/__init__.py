"""Autocast as CUDA does it, on meta tensors."""
