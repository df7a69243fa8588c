"""The findings of `planner check` as the systems of continuous integration read them."""
