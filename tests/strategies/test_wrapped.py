"""What runs and lives inside tensors that wrap others: float8, 2:4 and low-bit ones, on a CPU."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from conftest import TINY, living, part_named
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional as F
from torch.nn.parameter import Buffer

from harness.memory.tracer import trace_step
from harness.worker.loop import optimizer_step
from strategies.base import NotInForce
from strategies.evidence import forward
from strategies.evidence.stored import bytes_of, tensors, wrapped


def traced(train_here, recipe: str):
    """A run of two steps and a traced third; what other tests have left is not in it."""
    before = living()
    run, log = train_here(dataclasses.replace(TINY, recipe=recipe), 2)
    held = [*vars(run.feed.dataset).values(), *before]
    found = trace_step(run.trained, "cpu", lambda: optimizer_step(run, 2, log), held)
    return run, log, found


def test_only_tensors_that_wrap_others_are_unwrapped():
    float8 = pytest.importorskip("torchao.float8.float8_training_tensor")
    assert wrapped((torch.nn.Parameter, float8.Float8TrainingTensor))
    assert wrapped((torch.sparse.SparseSemiStructuredTensor,))
    assert not wrapped((torch.Tensor, torch.nn.Parameter, Buffer, FakeTensor, FunctionalTensor))
    assert not wrapped(())


# -- float8 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "product", "other"),
    [
        ("single+fp8", "aten::_scaled_mm", "aten::mm"),
        ("single+fp8:emulate=on", "aten::mm", "aten::_scaled_mm"),
    ],
)
def test_the_products_inside_float8_tensors_are_seen(recipe, product, other, train_here):
    run, _ = train_here(dataclasses.replace(TINY, recipe=recipe), 1)
    ran = [operation.name for operation in forward.operations(run.trained)]
    wanted = 4 * len(run.trained.module.blocks)
    assert (ran.count(product), ran.count(other)) == (wanted, 0)
    facts = part_named(recipe, "fp8").evidence(run.trained)
    assert facts["float8_products"] == (0 if "emulate" in recipe else wanted)
    assert facts["float8_casts"] == 2 * wanted


def test_float8_beside_a_trained_branch_is_counted_in_both(train_here):
    recipe = "single+fp8+controlnet"
    run, _ = train_here(dataclasses.replace(TINY, recipe=recipe), 1)
    attentions = len(run.trained.subject.attentions(run.trained.module))
    assert attentions > len(run.trained.module.blocks)
    assert part_named(recipe, "fp8").evidence(run.trained)["float8_products"] == 4 * attentions


# -- 2:4 --------------------------------------------------------------------------------------


def kept(dense):
    """torch's choice in tiles of 4 by 4: the largest first, at most two a row and a column."""
    rows, columns = dense.shape
    tiles = dense.abs().view(rows // 4, 4, columns // 4, 4).transpose(1, 2).reshape(-1, 16)
    chosen, each = torch.zeros_like(tiles, dtype=torch.bool), torch.arange(len(tiles))
    for place in tiles.argsort(dim=1, descending=True).unbind(1):
        square, row, column = chosen.view(-1, 4, 4), place // 4, place % 4
        free = (square[each, row].sum(1) < 2) & (square[each, :, column].sum(1) < 2)
        chosen[each[free], place[free]] = True
    return chosen.view(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


def packed(dense, algorithm="", use_cutlass=True):
    """What torch's kernel gives, with pruned weights in full where a GPU has packed ones."""
    pruned = (dense * kept(dense)).bfloat16()
    none = torch.empty(0, 0)
    return pruned, none, pruned.t().contiguous(), none, none


def product(packed, dense, bias=None, alpha=None, out_dtype=None, transpose_result=False, *_, **__):
    out = packed @ dense if bias is None else packed @ dense + bias[:, None]
    return out.t().contiguous() if transpose_result else out


@pytest.fixture
def sparse_kernels():
    """CPU kernels for the two operations that torch has on GPUs alone."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_sparse_semi_structured_tile", packed, "CPU")
    library.impl("_cslt_sparse_mm", product, "CPU")
    yield
    library._destroy()


def test_sparse_products_are_seen_inside_the_packed_weights(train_here, sparse_kernels):
    recipe = "single+bf16+sparse24"
    run, _, _ = traced(train_here, recipe)
    facts = part_named(recipe, "sparse24").evidence(run.trained)
    assert len(facts["ops"]) == 1 and "_mm" in facts["ops"][0]
    assert 0.5 < facts["half_zero_groups"] < 1, "torch's tiles keep fewer than half here and there"


@pytest.mark.parametrize(
    ("prune", "told"),
    [
        (lambda dense: torch.ones_like(dense), "fewer than two zeros"),
        (lambda dense: torch.zeros_like(dense), "only 0% of the groups"),
    ],
)
def test_a_packing_that_is_not_half_is_noticed(
    train_here, sparse_kernels, monkeypatch, prune, told
):
    recipe = "single+bf16+sparse24"
    run, _, _ = traced(train_here, recipe)
    monkeypatch.setattr(sys.modules[__name__], "kept", prune)
    with pytest.raises(NotInForce, match=told):
        part_named(recipe, "sparse24").evidence(run.trained)


def test_weights_packed_for_dense_products_are_noticed(train_here, sparse_kernels, monkeypatch):
    packed24 = pytest.importorskip("strategies.sparsity.packed24")

    def forward_of(self, x):
        packed24.semi_structured_sparsify(self.weight.bfloat16(), backend="cusparselt")
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())

    monkeypatch.setattr(packed24.Packed24, "forward", forward_of)
    recipe = "single+bf16+sparse24"
    run, _, _ = traced(train_here, recipe)
    assert any("semi_structured_tile" in op for op in run.trained.ops)
    with pytest.raises(NotInForce, match="no sparse product"):
        part_named(recipe, "sparse24").evidence(run.trained)


# -- low-bit states ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["single+adam8bit:lib=torchao", "single+adam4bit"])
def test_low_bit_states_count_with_the_bytes_that_are_stored(recipe, train_here):
    """Their tensors look like float32; the height is the profiler's, which sees no tensors."""
    run, log, found = traced(train_here, recipe)
    stored = bytes_of(tensors(run.trained.inner_optimizer))
    assert found.optimizer_state == stored
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer_step(run, 3, log)
    height = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            height += event.nbytes()
            peak = max(peak, height)
    known = found.parameters + found.optimizer_state + found.ema
    assert peak == pytest.approx(found.total - known, rel=0.02)
