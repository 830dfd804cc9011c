"""Block swapping: weights in host memory that are copied to the device for the block that needs
them."""
