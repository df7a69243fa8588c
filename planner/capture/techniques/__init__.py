"""The training techniques that a capture supports, one module each."""
