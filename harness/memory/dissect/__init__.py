"""Memory and time breakdown of one run, collected after its steps.

``timeline`` traces every storage through one step, with the module that allocated it. ``taking``
counts and times each operation, and combines all into a
``harness.memory.memory_breakdown.MemoryBreakdown``.
"""

from harness.memory.dissect.taking import take

__all__ = ["take"]
