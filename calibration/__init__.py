"""Measurements of real training steps on a GPU, and the fit of what cannot be known without one.

`probe` runs a job's steps in a fresh process, `campaign` runs lists of them within a time, `calibrate`
replays and fits them, `verify` compares a run with its estimate, and `records` reads runs that were measured
elsewhere. The planner reads the calibrations by `planner.hardware.calibration` and needs nothing from here.

Nothing here has run on a GPU yet: the probe's figures on CUDA are untried, and the only tables that ship are
fitted from figures that others published.
"""
