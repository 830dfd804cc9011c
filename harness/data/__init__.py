"""Data sources: samples, latents, caches, and the order in which a training consumes them."""
