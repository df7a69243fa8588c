"""Pictures of results; they need matplotlib."""
