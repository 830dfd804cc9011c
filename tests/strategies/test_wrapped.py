"""What runs and lives inside tensors that wrap others: float8, 2:4 and low-bit ones, on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import TINY, highest, part_named, traced_here
from torch.nn import functional as F

from harness.worker.loop import optimizer_step
from strategies.adapters import coded
from strategies.base import NotInForce
from strategies.evidence.readings import bytes_of, tensors
from tests.made import stand_ins

# -- int8 -------------------------------------------------------------------------------------


def test_a_product_in_int8_and_its_gradient_are_those_of_the_rounded_matrices():
    torch.manual_seed(0)
    x, w = torch.randn(2, 24, 64, requires_grad=True), torch.randn(48, 64)
    codes, scale = coded.coded(w, "int8")
    gradient = torch.randn(2, 24, 48)
    out = coded.Product.apply(x, codes, scale, None, "int8", True)
    out.backward(gradient)

    def rounded(rows):
        return coded.decoded(*coded.coded(rows.flatten(0, 1), "int8"), "int8", torch.float32)

    def distance(a, b):
        return float((a.detach().flatten(0, 1) - b).norm() / b.norm())

    kept = coded.decoded(codes, scale, "int8", torch.float32)
    assert distance(out, rounded(x.detach()) @ kept.T) < 1e-6
    scaled = gradient * scale.view(-1)
    assert distance(x.grad, rounded(scaled) @ codes.view(torch.int8).float()) < 1e-6
    assert distance(out, x.detach().flatten(0, 1) @ w.T) < 0.02
    assert distance(x.grad, gradient.flatten(0, 1) @ w) < 0.02


# -- 2:4 --------------------------------------------------------------------------------------


def test_weights_packed_for_dense_products_are_noticed(train_here, monkeypatch):
    packed24 = pytest.importorskip("strategies.sparsity.packed24")

    def forward_of(self, x):
        packed24.semi_structured_sparsify(self.weight.bfloat16(), backend="cusparselt")
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())

    monkeypatch.setattr(packed24.Packed24, "forward", forward_of)
    recipe = "single+bf16+sparse24"
    with stand_ins.sparse_kernels():
        run, _ = traced_here(train_here, dataclasses.replace(TINY, recipe=recipe))
    assert any("semi_structured_tile" in op for op in run.ops)
    with pytest.raises(NotInForce, match="no sparse product"):
        part_named(recipe, "sparse24").evidence(run)


# -- low-bit states ---------------------------------------------------------------------------


def test_low_bit_states_count_with_the_bytes_that_are_stored(train_here):
    """Their tensors look like float32; the height is the profiler's, which sees no tensors."""
    run, found = traced_here(train_here, dataclasses.replace(TINY, recipe="single+adam4bit"))
    stored = bytes_of(tensors(run.inner_optimizer))
    assert found.optimizer_state == stored
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer_step(run, 3)
    known = found.parameters + found.optimizer_state + found.ema
    assert highest(profile) == pytest.approx(found.total - known, rel=0.02)
