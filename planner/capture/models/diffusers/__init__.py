"""Models of diffusers: networks, autoencoders and ControlNets, from their configurations alone."""
