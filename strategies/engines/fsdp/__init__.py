"""FSDP2: its engine, and what torch's objects and a step of it show."""
