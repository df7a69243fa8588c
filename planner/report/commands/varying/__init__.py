"""The reports of plans whose samples have varying sizes."""
