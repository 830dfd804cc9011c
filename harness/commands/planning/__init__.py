"""Commands for before a training: plan it, calibrate what a plan assumes, export what it found."""
