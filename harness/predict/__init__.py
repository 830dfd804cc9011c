"""Prediction: what a recipe will need on a machine that is not there.

The real set-up and the real training step run on tensors without storage (``simulate``). Each
allocation is followed (``trace``); the record gives the peaks (``harness.memory.record``), is
replayed through a model of CUDA's caching allocator (``allocator``) and timed by a roofline
(``roofline``). One process a recipe (``worker``); nothing outside that process imports torch.
"""
