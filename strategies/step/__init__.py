"""How a step is taken: accumulation, backward, the optimizer within it, the average after it."""
