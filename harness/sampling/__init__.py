"""Rows that draw samples instead of training: their measurement, figures and analyses."""
