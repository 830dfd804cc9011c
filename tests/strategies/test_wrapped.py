"""What runs and lives inside tensors that wrap others: float8, 2:4 and low-bit ones, on a CPU."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import HALF, TINY, highest, part_named, traced_here
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional as F
from torch.nn.parameter import Buffer

from harness.worker.loop import optimizer_step
from strategies import CATALOG
from strategies.adapters import coded
from strategies.base import NotInForce, Settings
from strategies.evidence import states
from strategies.evidence.readings import bytes_of, tensors, wrapped
from tests.made import stand_ins

# A CPU takes 0.1 s for a float8 product of a larger batch.
ONE = dataclasses.replace(TINY, model=HALF, global_batch=1)


def test_only_tensors_that_wrap_others_are_unwrapped():
    float8 = pytest.importorskip("torchao.float8.float8_training_tensor")
    assert wrapped((torch.nn.Parameter, float8.Float8TrainingTensor))
    assert wrapped((torch.sparse.SparseSemiStructuredTensor,))
    assert not wrapped((torch.Tensor, torch.nn.Parameter, Buffer, FakeTensor, FunctionalTensor))
    assert not wrapped(())


@pytest.mark.parametrize(
    ("recipe", "product", "other"),
    [
        ("single+fp8", "aten::_scaled_mm", "aten::mm"),
        ("single+fp8:emulate=on", "aten::mm", "aten::_scaled_mm"),
    ],
)
def test_the_products_inside_float8_tensors_are_seen(recipe, product, other, train_here):
    run, _ = train_here(dataclasses.replace(ONE, recipe=recipe), 1)
    ran = [operation.name for operation in states.operations(run.trained)]
    wanted = 4 * len(run.trained.module.blocks)
    assert (ran.count(product), ran.count(other)) == (wanted, 0)
    facts = part_named(recipe, "fp8").evidence(run.trained)
    assert facts["float8_products"] == (0 if "emulate" in recipe else wanted)
    assert facts["float8_casts"] == 2 * wanted


def test_float8_beside_a_trained_branch_is_counted_in_both(train_here):
    recipe = "single+fp8+controlnet"
    run, _ = train_here(dataclasses.replace(ONE, recipe=recipe), 1)
    attentions = len(run.trained.subject.attentions(run.trained.module))
    assert attentions > len(run.trained.module.blocks)
    assert part_named(recipe, "fp8").evidence(run.trained)["float8_products"] == 4 * attentions


# -- int8 -------------------------------------------------------------------------------------


def test_a_product_in_int8_and_its_gradient_are_those_of_the_rounded_matrices():
    torch.manual_seed(0)
    x, w = torch.randn(2, 24, 64, requires_grad=True), torch.randn(48, 64)
    codes, scale = coded.coded(w, "int8")
    gradient = torch.randn(2, 24, 48)
    out = coded.product(x, codes, scale, None, "int8", dynamic=True)
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


@pytest.fixture
def sparse_kernels():
    with stand_ins.sparse_kernels():
        yield


def test_sparse_products_are_seen_inside_the_packed_weights(train_here, sparse_kernels):
    recipe = "single+bf16+sparse24"
    run, _, _ = traced_here(train_here, dataclasses.replace(TINY, recipe=recipe))
    facts = part_named(recipe, "sparse24").evidence(run.trained)
    assert len(facts["ops"]) == 1 and "_mm" in facts["ops"][0]


def test_weights_packed_for_dense_products_are_noticed(train_here, sparse_kernels, monkeypatch):
    packed24 = pytest.importorskip("strategies.sparsity.packed24")

    def forward_of(self, x):
        packed24.semi_structured_sparsify(self.weight.bfloat16(), backend="cusparselt")
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())

    monkeypatch.setattr(packed24.Packed24, "forward", forward_of)
    recipe = "single+bf16+sparse24"
    run, _, _ = traced_here(train_here, dataclasses.replace(TINY, recipe=recipe))
    assert any("semi_structured_tile" in op for op in run.trained.ops)
    with pytest.raises(NotInForce, match="no sparse product"):
        part_named(recipe, "sparse24").evidence(run.trained)


# -- low-bit states ---------------------------------------------------------------------------


@pytest.mark.parametrize("beta2", [0.999, 0.95])
def test_a_rounded_second_moment_falls_only_by_a_smaller_beta2(beta2):
    weight = torch.nn.Parameter(torch.ones(8))
    settings = Settings(betas=(0.9, beta2))
    optimizer = CATALOG["adam16bit"]().make_optimizer(
        [weight], settings, SimpleNamespace(device="cpu")
    )
    weight.grad = torch.linspace(0.1, 1, 8)
    optimizer.step()
    before = optimizer.state[weight]["exp_avg_sq"].clone()
    weight.grad.zero_()
    optimizer.step()
    fell = optimizer.state[weight]["exp_avg_sq"] < before
    assert fell.all() if beta2 == 0.95 else not fell.any()


@pytest.mark.parametrize("recipe", ["single+adam8bit:lib=torchao", "single+adam4bit"])
def test_low_bit_states_count_with_the_bytes_that_are_stored(recipe, train_here):
    """Their tensors look like float32; the height is the profiler's, which sees no tensors."""
    run, log, found = traced_here(train_here, dataclasses.replace(TINY, recipe=recipe))
    stored = bytes_of(tensors(run.trained.inner_optimizer))
    assert found.optimizer_state == stored
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer_step(run, 3, log)
    known = found.parameters + found.optimizer_state + found.ema
    assert highest(profile) == pytest.approx(found.total - known, rel=0.02)
