"""The training loop that is captured."""
