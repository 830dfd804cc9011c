"""The ``calibrate`` command: measure the rates of a machine, and rows to fit predictions to.

Each station measures in its own process (``running``), then one suite runs the rows (``rows``); the
same command resumes from both. Only ``stations`` imports torch.
"""
