"""Modules that build the reports of commands.

Each module builds the document and the JSON object of a command.
"""
