"""torchvision without its compiled operators and weights."""
