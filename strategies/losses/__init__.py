"""Losses over a vocabulary, which differ in the number of logits held at a time."""
