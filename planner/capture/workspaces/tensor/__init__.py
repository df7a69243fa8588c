"""Workspaces of operators on tensors."""
