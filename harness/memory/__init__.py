"""Where memory goes: the tracer of tensor storage, its categories, and one step dissected."""
