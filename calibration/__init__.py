"""Measure real training steps on a GPU, and fit calibrations to the measurements.

`probe` runs a job's steps in a fresh process, `campaign` runs lists of jobs within a time limit, `calibrate`
replays the runs and fits calibrations, `verify` compares a run with its estimate, and `records` reads runs
that were measured elsewhere. The planner reads the calibrations by `planner.hardware.calibration`, which
needs nothing from this package.

No part of the package has run on a GPU yet: the probe's figures on CUDA are untried, and the only tables
that ship are fitted to figures that others published.
"""
