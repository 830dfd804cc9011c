"""One rank of one run: set-up, training loop, measurement, audit and checkpoints."""
