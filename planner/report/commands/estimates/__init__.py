"""The reports of `planner estimate` and `planner compare`, and parts of reports on a batch."""
