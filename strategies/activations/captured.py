"""CUDA graphs of a model's forward, one for each input shape: captured once, then replayed.

Imports torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from strategies.base import Watcher

WARM = 3
"""Calls before a capture, in which libraries allocate their workspaces (torch's own number)."""


@dataclass(frozen=True)
class Replayed:
    """CUDA graph with its input and output tensors."""

    graph: Any
    inputs: list[Any]
    output: Any

    def __call__(self, leaves: list[Any]) -> Any:
        """Replay the graph for ``leaves``, and return copies that no later call overwrites."""
        for mine, given in zip(self.inputs, leaves, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        self.graph.replay()
        return tree_map_only(Tensor, torch.clone, self.output)


class Captured(Watcher):
    """Replacement of ``forward`` that replays ``graphs`` by input shape.

    The graphs hold their memory until the process ends. ``replays`` and ``eager`` count calls; the
    latter are those of a trace, which cannot see a graph's kernels. ``noted`` are both counts after
    the last batch.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.graphs: dict[Any, Replayed] = {}
        self.pool: Any = None
        self.replays = self.eager = 0
        self.noted = (0, 0)
        self.aside = False

    def __call__(self, *given: Any, **named: Any) -> Any:
        if self.aside or _get_current_dispatch_mode() is not None:
            self.eager += 1
            return self.forward(*given, **named)
        leaves, spec = tree_flatten((given, named))
        key = (repr(spec), *(_size(leaf) for leaf in leaves))
        if key not in self.graphs:
            self.graphs[key] = self._capture(leaves, spec)
        self.replays += 1
        return self.graphs[key](leaves)

    def _capture(self, leaves: list[Any], spec: Any) -> Replayed:
        """Capture a graph. Source: torch.cuda.graphs' documentation, "Whole-network capture"."""
        inputs = tree_map_only(Tensor, torch.clone, leaves)
        given, named = tree_unflatten(inputs, spec)
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM):
                self.forward(*given, **named)
        torch.cuda.current_stream().wait_stream(beside)
        # One pool for all shapes: outputs are copied before another graph runs.
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            output = self.forward(*given, **named)
        return Replayed(graph, inputs, output)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Call the original forward inside the context."""
        self.aside = True
        try:
            yield
        finally:
            self.aside = False

    def after_step(self) -> None:
        """Record the counts."""
        self.noted = (self.replays, self.eager)


def _size(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
