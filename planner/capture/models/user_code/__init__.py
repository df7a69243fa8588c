"""Run models and training steps that users write in files of their own."""
