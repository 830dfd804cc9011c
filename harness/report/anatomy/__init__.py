"""Page of one run's anatomy, drawn from a ``Portrait``: its memory and time by part."""
