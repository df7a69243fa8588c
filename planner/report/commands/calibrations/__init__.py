"""Stored calibrations, and what is measured for them."""
