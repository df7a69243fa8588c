"""Derive jobs from the live objects of a training run: its model, optimizer and batch."""
