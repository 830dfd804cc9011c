"""What a GPU does otherwise, by tensors without memory (worker/test_gpu has real ones)."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import TINY, part_named
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.activations.offload_activations import Host
from strategies.async_host_copy import MOST
from strategies.base import Settings
from strategies.optimizers.table import torchao_adam
from strategies.step.ema import PIECE

# -- optimizers that compile their step ------------------------------------------------------------


class Watching(TorchDispatchMode):
    """A trace, as far as torch can tell."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_traced_step_of_a_compiled_optimizer_is_taken_op_by_op(monkeypatch):
    """torchao's on a GPU, by a compiler that needs none. torch 2.13 raises in a trace:
    "fullgraph=True found no compiled frames"."""
    pytest.importorskip("torchao")
    graphs = []

    def noted(graph, given):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=noted))
    weight = torch.nn.Parameter(torch.ones(8, 1024))
    optimizer = torchao_adam("torchao.optim:AdamW8bit", [weight], Settings(), "cuda")
    weight.grad = torch.ones_like(weight)
    with Watching():
        optimizer.step()
    assert optimizer.compiled_steps == len(graphs) == 0
    assert not weight.equal(torch.ones_like(weight)), "it steps all the same"
    optimizer.step()
    torch._dynamo.reset()
    assert optimizer.compiled_steps == 1 and graphs, "every other step is compiled"


# -- what leaves the device ------------------------------------------------------------------------


def test_a_tensor_of_the_host_that_autograd_keeps_stays_where_it_is():
    """A GPU's operation may save a number that lies in host memory; it has no stream."""
    host = Host(lambda blocks, *given: None)
    host.device = "cuda"
    kept = torch.ones(4096)
    assert host.pack(kept) is kept and host.moved["out"] == 0
    host.device = "cpu"
    assert isinstance(host.pack(kept), tuple), "where the device is the host, it is offloaded"


# -- the average in host memory --------------------------------------------------------------------


def test_a_prediction_for_a_gpu_has_the_buffers_of_an_average_on_the_host(train_here):
    """No larger than the largest shard, and whole powers of two, as pinned blocks are."""
    run = train_here(TINY, 1)
    average = run.attached["ema"]
    assert average.staging is None, "a CPU reads its own memory"
    average.on_host = True
    average._stage(torch.empty(1000, device="meta"))
    average._stage(torch.empty(3000, device="meta"))
    average._stage(torch.empty(7, device="meta"))
    assert [b.numel() for b in average.staging.buffers] == [4096, 4096]
    average._stage(torch.empty(PIECE + 1, device="meta"))
    assert average.staging.elements == PIECE
    assert {id(b) for b in average.staging.buffers} <= {id(t) for t in average.hosted()}
    assert part_named("single", "ema").place == "device"


# -- copies on a stream of their own ---------------------------------------------------------------


def test_a_prediction_for_a_gpu_holds_what_is_leaving():
    """By the calls' order alone, as on a GPU; a CPU's copies are made at once."""

    def run(blocks, x, c):
        for _ in range(MOST + 2):
            x = (x * c).tanh()
        return x

    for place, wanted in (("meta", MOST), ("cpu", 0)):
        host, seen = Host(run), []
        with FakeTensorMode():
            x = torch.empty(1024, device=place, requires_grad=True)
            out = host([torch.nn.Identity()], x, torch.empty(1024, device=place))
            seen.append(len(host.host_copy.held))
            out.sum().backward()
            seen.append(len(host.host_copy.held))
        assert seen == [wanted, 0] and host.moved["out"] == host.moved["back"] > MOST
