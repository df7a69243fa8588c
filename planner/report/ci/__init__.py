"""Reports of `planner check` for continuous integration (CI)."""
