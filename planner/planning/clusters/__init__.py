"""Find how many GPUs a global batch needs, and how to split the model over them."""
