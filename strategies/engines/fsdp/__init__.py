"""FSDP2: engine, sharding and evidence."""
