"""What applies when samples are drawn: how weights are stored, and how guidance is computed."""
