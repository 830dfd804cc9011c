"""Launch of a resolved spec: ``accelerate launch`` as a child with a deadline, and a typed
outcome."""
