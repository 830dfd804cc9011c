"""Predictions of memory and time for a recipe on hardware that is not present.

Real set-up and steps run on tensors without storage (``tracing``), in a process that alone imports
torch (``worker``). A replay of CUDA's caching allocator gives the reserved memory, a roofline the
time (``speed``). Commands: ``plan``, ``atlas``, ``calibrate``, ``export``.
"""
