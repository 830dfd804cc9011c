"""The page of one run's anatomy: where its memory and time went, drawn from a ``Portrait``."""
