"""Readers of runs that were measured elsewhere."""
