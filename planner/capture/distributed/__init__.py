"""Run one rank of a distributed job by torch's own code, with collectives that send nothing."""
