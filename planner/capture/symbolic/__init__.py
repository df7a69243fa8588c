"""Symbolic integers and tensors: programs for any batch size."""
