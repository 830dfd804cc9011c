"""Samples drawn from noise, in batches, as the other workload of a run."""
