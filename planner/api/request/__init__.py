"""Turn a caller's options into a job, memory limits and the source of the job's traces."""
