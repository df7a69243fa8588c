"""Compile and load the stand-in libraries for an installation of torch."""
