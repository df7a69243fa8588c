"""Reports of `planner check` for systems of continuous integration."""
