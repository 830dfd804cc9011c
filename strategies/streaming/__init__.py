"""Block swapping: weights in host memory, copied to the device for the block that needs them."""
