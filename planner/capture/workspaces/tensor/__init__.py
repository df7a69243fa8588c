"""Define workspace rules of operators on tensors."""
