"""Build networks, autoencoders and ControlNets of diffusers from their configurations alone."""
