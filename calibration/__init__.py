"""Measure real training steps on a GPU, and fit calibrations to the measurements.

`probe` runs a job's steps in a fresh process, `campaign` runs lists of jobs within a time limit, `calibrate`
replays the runs and fits calibrations, `verify` compares a run with its estimate, and `records` reads runs
that were measured elsewhere. The planner reads the calibrations by `planner.hardware.calibration`, which
needs nothing from this package.

An H200 has run jobs of the planner, whose records `records` reads (docs/measured.md). The other tables that
ship are fitted to figures that others published.
"""
