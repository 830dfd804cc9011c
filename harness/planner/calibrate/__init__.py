"""The ``calibrate`` command."""
