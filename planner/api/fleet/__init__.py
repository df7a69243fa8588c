"""Plan a job on each known GPU, or over the GPUs of a cluster."""
