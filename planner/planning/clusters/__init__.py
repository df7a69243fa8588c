"""Find how many GPUs a global batch needs, and how the model is split over them."""
