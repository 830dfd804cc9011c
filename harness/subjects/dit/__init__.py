"""Diffusion transformer (DiT) of Peebles and Xie 2022: a new implementation, for images, video and
tokens."""
