"""Adapters of the engines for predictions, found by the name of an engine's class.

A prediction runs a recipe's own set-up and step on tensors without storage. The adapter replaces
the calls that need real ranks or devices, names the ranks to trace, and fills in the numbers of the
engine's launch file for export. The modules in ``ADAPTERS`` import no torch until a trace begins.
"""

from __future__ import annotations

from harness.planner.adapters.base import NoAdapter, TraceAdapter
from strategies.base import LazyTable
from strategies.engine import Engine

__all__ = ["ADAPTERS", "adapter_of"]

ADAPTERS = LazyTable(
    {
        "Alone": "harness.planner.adapters.base:SingleProcess",
        "Replicas": "harness.planner.adapters.ddp:DdpAdapter",
        "Zero": "harness.planner.adapters.zero:ZeroAdapter",
        "Fsdp": "harness.planner.adapters.fsdp:FsdpAdapter",
        "Pipeline": "harness.planner.adapters.pipeline:PipelineAdapter",
    }
)
"""Name of an engine's class -> its adapter. A look-up imports the adapter's module."""


def adapter_of(engine: Engine, rank: int = 0) -> TraceAdapter:
    """Return the adapter that traces ``rank`` of a launch of ``engine``.

    An engine without one gets an adapter whose trace ends with the reason.
    """
    name = type(engine).__name__
    return ADAPTERS.get(name, NoAdapter)(engine, rank)
