"""Define workspace rules of layers and losses."""
