"""Run the estimators that need torch."""
