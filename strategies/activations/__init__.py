"""Block execution: attention kernels, activation checkpointing and offload, compiled and CUDA
graphs."""
