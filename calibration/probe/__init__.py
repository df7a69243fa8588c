"""Measure a job on a GPU in a separate process."""
