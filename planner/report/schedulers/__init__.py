"""Requests for GPUs in the formats of schedulers: Slurm, Kubernetes, SkyPilot and Ray."""
