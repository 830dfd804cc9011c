"""Step strategies: gradient accumulation, backward calls, optimizer in backward, weight average."""
