"""DeepSpeed's ZeRO: its engine, and what DeepSpeed's objects, its files and a step of it show."""
