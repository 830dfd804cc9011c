"""What one card, driver and torch were measured to do: a small file each, which predictions use.
No torch.

``record`` is the file, ``residuals`` what its rows tell of the error of a prediction, ``store``
finds the one that is for a card. ``harness.calibrate`` makes them.
"""
