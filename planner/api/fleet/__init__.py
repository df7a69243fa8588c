"""Plan a job for many GPUs, with their prices."""
