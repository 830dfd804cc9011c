"""Pruning and 2:4 sparsity."""
