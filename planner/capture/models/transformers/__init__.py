"""Build models of transformers from their configurations, and run its Trainers in captures."""
