"""Helpers that are independent of planning; each is imported from its module."""
