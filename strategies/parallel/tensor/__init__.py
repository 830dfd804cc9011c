"""Matrices of the blocks, each rank a part of them: what is multiplied is added up."""
