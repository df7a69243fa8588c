"""Build programs that hold for any batch size, by symbolic integers and tensors."""
