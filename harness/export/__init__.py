"""Take it home: a recipe as files, lines of code and options for a trainer of one's own."""
