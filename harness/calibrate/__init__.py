"""Measures what predictions assume of this machine, and holds predictions to rows that ran here.

A part (check, memory, story) is a list of stations in order of worth (``parts``); what fits the
budget runs, each in processes of its own (``running``), and leaves an outcome by which the same
command resumes. ``assemble`` makes the calibration of them, ``goals`` judges it. No torch outside
of ``stations``.
"""
