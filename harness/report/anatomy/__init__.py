"""Page of one run's anatomy, drawn from a ``MemoryBreakdown``: its memory and time by part."""
