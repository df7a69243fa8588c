"""Integrations of training frameworks: they translate settings to a job, and set its batch size.

Public names are in `planner.api.integrations.lightning` and `planner.api.integrations.huggingface`.
"""
