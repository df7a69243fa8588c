"""The ways to train that a capture knows, each in a module of its own."""
