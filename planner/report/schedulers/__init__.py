"""Requests for GPUs in the words of schedulers: Slurm, Kubernetes, SkyPilot, Ray."""
