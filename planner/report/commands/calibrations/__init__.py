"""Reports of the commands on calibrations.

They show stored calibrations, runs that calibrate or verify, and contributed measurements.
"""
