"""Parameter-efficient training: adapters on frozen weights, or training some of the weights
only."""
