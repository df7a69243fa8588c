"""Code that runs inside the user's own Python: it builds and loads the stand-in libraries, and records.

Standard library only, Python 3.9 or newer, relative imports: the command's environment need not have the
planner.
"""
