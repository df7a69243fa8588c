"""Workspaces of layers and losses."""
