"""Losses over a vocabulary: how much of the logits is there at a time."""
