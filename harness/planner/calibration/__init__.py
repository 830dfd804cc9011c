"""Calibration files: measured rates of one card, driver and torch version. Does not import
torch."""
