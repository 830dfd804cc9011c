"""What is measured of a device beside rows, each in a process of its own that has torch:
``python -m harness.calibrate.stations NAME OUT``. A fault of one measure is a reason, not an end.
"""
