"""Sampling strategies: weights stored in fewer bits."""
