"""Integrations of training frameworks.

They translate a framework's settings to a job, and set its batch size. Public names are in
`planner.api.integrations.lightning` and `planner.api.integrations.huggingface`.
"""
