"""One module a command: its report as a document and as JSON."""
