"""Interpret operators with values on the CPU, for models whose control flow depends on values."""
