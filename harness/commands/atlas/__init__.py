"""``./run.sh atlas``: public models by cards, what is predicted to fit, as a page."""
