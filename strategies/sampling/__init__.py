"""Sampling strategies: weight storage, adapters, and guidance."""
