"""Models by name, as modules without weights."""
