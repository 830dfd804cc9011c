"""Sequence parallel: each rank has a part of the tokens of the same samples."""
