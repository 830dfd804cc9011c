"""The ten numbers of a ranking, from raw results, by code that shares nothing with the reports'.

As docs/explanation/noise-and-fairness.md and the notes below the tables define them. It imports the
standard library alone.
"""
