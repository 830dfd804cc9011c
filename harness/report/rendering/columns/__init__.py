"""The columns of every table: each with its head and unit, its value in a row, and its kind."""
