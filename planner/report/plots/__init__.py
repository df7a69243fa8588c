"""Pictures; they need matplotlib."""
