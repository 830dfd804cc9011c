"""The ``export`` command: launch files, code lines and trainer options of a recipe."""
