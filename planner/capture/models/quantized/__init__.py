"""Quantize the weights of linear layers as bitsandbytes and torchao do."""
