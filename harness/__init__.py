"""Runs recipes, measures them, and reports on them."""
