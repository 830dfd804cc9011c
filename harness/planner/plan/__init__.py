"""The ``plan`` command."""
