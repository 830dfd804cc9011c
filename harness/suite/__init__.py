"""Suites of recipes to compare: their files, their rows and their runs."""
