"""Data: samples, latents and the order in which a training consumes them."""
