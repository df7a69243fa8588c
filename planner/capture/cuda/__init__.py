"""Make torch.cuda, and operators on meta tensors, behave as on a CUDA GPU."""
