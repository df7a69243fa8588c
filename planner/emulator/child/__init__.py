"""Build and load the stand-in libraries inside the user's own Python process.

The package also records the process's memory. This package uses only the standard library, Python 3.9 or
newer and relative imports, since the environment of the user's command need not have the planner.
"""
