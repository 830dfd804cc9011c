"""Hook of the worker: the measurement of a run that draws samples."""

HOOKS = {"measure_samples": "harness.sampling.measure:measure"}
