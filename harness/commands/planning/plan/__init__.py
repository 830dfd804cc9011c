"""``./run.sh plan``: what it is asked, what it answers, and how each answer is shown."""
