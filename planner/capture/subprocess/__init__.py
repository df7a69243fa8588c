"""Capture a model in a child process."""
