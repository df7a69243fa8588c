"""Find models of torchvision.

Its compiled operators are not needed, and no weights are read.
"""
