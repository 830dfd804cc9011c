"""Evidence shared by strategies and engines: watched steps, readings and rules."""
