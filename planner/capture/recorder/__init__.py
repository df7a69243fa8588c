"""The record of allocations, by operator and module."""
