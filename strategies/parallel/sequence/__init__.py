"""Tokens of the same samples, each rank a part of them: around attention they meet."""
