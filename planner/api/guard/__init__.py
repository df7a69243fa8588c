"""Plan a training loop before its first step, and measure it to its end."""
