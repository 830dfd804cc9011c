"""DeepSpeed ZeRO: engine, settings, evidence and trace adapter."""
