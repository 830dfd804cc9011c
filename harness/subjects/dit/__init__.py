"""The diffusion transformer (DiT) of Peebles and Xie 2022, written anew."""
