"""Build the networks and losses of nnU-Net's plans."""
