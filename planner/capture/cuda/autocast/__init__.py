"""CUDA's autocast on meta tensors."""
