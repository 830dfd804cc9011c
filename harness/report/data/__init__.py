"""What a report knows: rows, groups, every derived number, and what a table of text is."""
