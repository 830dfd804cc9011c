"""Ranks that share samples (``sequence``) or weights (``tensor``)."""
