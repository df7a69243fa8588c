"""Build the report of each command, as a document and as a JSON object."""
