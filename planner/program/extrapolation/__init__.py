"""Extrapolate traces: fits over batch sizes, and deep models from shallow models."""
