"""The ``calibrate`` command: measure a machine, and hold predictions to rows that ran on it.

A part (check, memory, story) is a list of stations, the most useful first (``parts``). Stations run
in processes of their own (``running``); each leaves an outcome, from which the same command
resumes. No torch outside of ``stations``.
"""
