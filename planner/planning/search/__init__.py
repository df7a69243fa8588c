"""Search for the largest batch size or sample size that fits, from few traces and few replays."""
