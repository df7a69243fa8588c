"""The reports of commands: one module each, with its document and its JSON."""
