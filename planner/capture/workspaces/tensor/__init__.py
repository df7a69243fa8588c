"""Workspace rules of operators on tensors."""
