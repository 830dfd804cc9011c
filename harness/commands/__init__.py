"""One module per command of ``./run.sh``, and the output that they share."""
