"""This machine's hardware and software, its processes, and the requirements of a run."""
