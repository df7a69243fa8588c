"""Compare the jobs of a pyproject.toml with their memory budgets."""
