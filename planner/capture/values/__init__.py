"""Interpretation with values, for models whose course depends on them."""
