"""Data of a report: rows, groups, comparisons, and tables of text."""
