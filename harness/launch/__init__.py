"""From a resolved spec to accelerate launch, a child with a deadline, and a typed outcome."""
