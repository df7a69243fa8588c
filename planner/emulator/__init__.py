"""A GPU that is not there: CUDA builds of torch run on stand-in libraries that only count memory."""
