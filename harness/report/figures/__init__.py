"""Figures derived from raw results: pure functions, independent of rows and reports."""
