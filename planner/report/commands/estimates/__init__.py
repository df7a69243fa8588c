"""The reports of estimates, by the trace and by other methods."""
