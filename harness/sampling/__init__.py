"""Rows that draw samples instead of training and their measurement."""
