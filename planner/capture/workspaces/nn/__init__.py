"""Workspace rules of layers and losses."""
