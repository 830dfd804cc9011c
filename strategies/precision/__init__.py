"""The types in which a step computes and keeps its weights."""
