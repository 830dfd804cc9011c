"""Where the memory and the time of one run go, collected from its own objects after its steps.

``timeline`` follows every storage through one step, ``modules`` says which module made it and
which saved it for backward, ``costs`` counts and times each operation, ``sweep`` measures small
models for the laws. ``take`` puts them together as a ``harness.memory.memory_breakdown.Portrait``.
"""

from harness.memory.dissect.taking import Look, take

__all__ = ["Look", "take"]
