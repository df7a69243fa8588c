"""Let planned scripts save and load checkpoints, without changing files of the user."""
