"""A training followed from its first line on, on tensors without storage."""
