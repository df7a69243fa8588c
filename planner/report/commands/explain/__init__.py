"""Reports that explain the memory of a batch by category, module, tensor and workspace."""
