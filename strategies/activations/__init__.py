"""How blocks run and what they keep for backward: kernels, recomputation, offload, graphs."""
