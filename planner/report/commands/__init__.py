"""The reports of commands: a module for each command, which builds its document and its JSON object."""
