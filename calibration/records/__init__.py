"""Read the records of runs that were measured elsewhere."""
