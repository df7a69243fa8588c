"""Build models of transformers, and run its Trainers in captures.

Models are built from their configurations.
"""
