"""Capture in a process of its own."""
