"""Let planned scripts save and load checkpoints without changing the user's files."""
