"""One rank of a distributed job: torch's own code for it, with collectives that send nothing."""
