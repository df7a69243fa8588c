"""What training frameworks decide of a job, setting by setting, and how their batch size is chosen.

The public names are those of `planner.api.integrations.lightning` and `planner.api.integrations.huggingface`.
"""
