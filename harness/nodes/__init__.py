"""Runs on several machines: who leads, a supervisor on each, the network, and how a run ended."""
