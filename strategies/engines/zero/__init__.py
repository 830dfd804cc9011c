"""DeepSpeed ZeRO: engine, settings and evidence."""
