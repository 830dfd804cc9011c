"""Data sources: samples, latents, and the order in which a training consumes them."""
