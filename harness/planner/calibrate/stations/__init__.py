"""Measurements of one card: kernels, collectives and fixed overhead."""
