"""Measuring real training steps on a GPU and fitting what cannot be known without one. Nothing is here yet.

The planner needs nothing from this package. What will come: probes that run a job's steps on a GPU, a fit of
the memory outside the tensors (CUDA context, cuDNN workspaces), and the calibration files that the planner
then reads.
"""
