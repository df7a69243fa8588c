"""Make operators and torch.cuda behave on meta tensors as on a CUDA GPU."""
