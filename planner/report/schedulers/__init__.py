"""Requests for GPUs in the formats of Slurm, Kubernetes, SkyPilot and Ray."""
