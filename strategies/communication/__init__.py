"""Gradient communication between replicas: compressed, top-k and sparse."""
