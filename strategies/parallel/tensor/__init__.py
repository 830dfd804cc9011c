"""Tensor parallel: each rank holds a part of the matrices of the blocks."""
