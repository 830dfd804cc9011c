"""Traces of set-up and training steps on tensors without storage, and their replay."""
