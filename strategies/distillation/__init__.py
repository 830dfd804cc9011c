"""A student that learns from a frozen teacher, and what draws in the teacher's place afterwards."""
