"""The ``export`` command: launch files and trainer options of a recipe."""
