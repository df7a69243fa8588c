"""Find models by name, and build them as modules without weights."""
