"""Where the memory of a batch goes, by category, module, tensor and workspace."""
