"""Helpers that know nothing of planning; imported by module."""
