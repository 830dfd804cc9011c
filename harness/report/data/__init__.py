"""What a report knows: rows, groups, what stands against what, and what a table of text is."""
