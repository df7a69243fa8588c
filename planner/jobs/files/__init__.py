"""Read jobs from files: YAML, the catalogue, and the configurations of torchtitan and DeepSpeed."""
