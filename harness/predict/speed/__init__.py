"""How fast a card, its memory and its links are: by data sheet, or as measured there. No torch."""
