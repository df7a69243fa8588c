"""Operators that take other paths on CUDA than on meta."""
