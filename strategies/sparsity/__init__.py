"""Weights that are zero, or gone."""
