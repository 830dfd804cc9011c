"""Precision strategies: the types of computation and of stored weights."""
