"""Find models of torchvision, without its compiled operators and without reading weights."""
