"""Build programs that hold for a range of batch sizes.

A few runs and symbolic workspace rules suffice.
"""
