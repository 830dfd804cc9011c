"""Memory measurement: the tracer of tensor storage, memory categories, and the anatomy of one
run."""
