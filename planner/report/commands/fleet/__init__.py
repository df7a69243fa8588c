"""Reports on many GPUs: the table of `planner gpus`, clusters, and the database."""
