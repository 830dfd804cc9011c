"""Parameter-efficient training: adapters on frozen weights, or some of the weights alone."""
