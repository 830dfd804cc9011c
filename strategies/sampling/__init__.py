"""Sampling strategies: weight storage and adapters."""
