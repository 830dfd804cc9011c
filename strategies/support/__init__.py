"""What strategies share or would be too long with: hooks, runners, wrappers and counters."""
