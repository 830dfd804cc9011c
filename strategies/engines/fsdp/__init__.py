"""FSDP2: engine, sharding, evidence and trace adapter."""
