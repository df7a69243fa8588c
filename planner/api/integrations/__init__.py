"""Settings of training frameworks, one by one: their effect on a job, and the choice of its batch size.

The public names are those of `planner.api.integrations.lightning` and `planner.api.integrations.huggingface`.
"""
