"""Run one rank of a distributed job by torch's own code.

Collectives send nothing.
"""
