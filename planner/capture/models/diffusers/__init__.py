"""Build diffusers' networks, autoencoders and ControlNets from configurations."""
