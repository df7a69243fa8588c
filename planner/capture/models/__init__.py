"""Find models by name, and build them without weights."""
