"""Build the report of each command, as a document and as a JSON object.

Each module builds the document and the JSON object of a command.
"""
