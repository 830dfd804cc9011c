"""Ranks that work on the same samples together, each on a part."""
