"""Models of transformers from their configurations."""
