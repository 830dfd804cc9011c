"""Predictions of memory and time for a recipe on hardware that is not present, and what uses them.

The real set-up and one real training step run on tensors without storage (``tracing``). The trace
gives the peaks, a replay of CUDA's caching allocator the reserved memory, and a roofline the time
(``speed``). Each recipe is traced in a process of its own (``worker``); nothing outside
that process imports torch. Commands: ``plan``, ``atlas``, ``calibrate`` and ``export``.
"""
