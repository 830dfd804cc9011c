"""The ``oom`` command: reads an out-of-memory message, a log or a memory snapshot."""
