"""Weights that wait in host memory, and come to the device for the block that needs them."""
