"""The ``atlas`` command: one plan for each model, card, number of GPUs and kind of training."""
