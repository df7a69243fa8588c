"""A GPU that is not there: real CUDA builds of torch on stand-in libraries that count memory and compute nothing."""
