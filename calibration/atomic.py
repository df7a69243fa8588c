"""Writing a file whole or not at all: the planner's own way, under the name that this package knows it by."""

from planner.atomic import write_bytes

__all__ = ["write_bytes"]
