"""Build models of transformers from their configurations, and read and train by its Trainers."""
