"""Estimators that need torch."""
