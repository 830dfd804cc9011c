"""The ``calibrate`` command: measure a machine, and compare predictions with rows that ran on it.

A part (check, memory, story) is a list of stations, the most useful first (``parts``). Each
station runs in its own process (``running``) and writes an outcome; the same command resumes
from the outcomes. Only ``stations`` imports torch.
"""
