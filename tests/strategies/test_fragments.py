"""Often-copied fragments that do not do what their text says, shown on our own DiT.

Written anew, in the shape in which they go round in posts; each test says what really happens.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from harness.subjects.dit.model import build

CLASSES = 10


@pytest.fixture
def parts():
    torch.set_num_threads(1)
    module = build(
        "DiT-T/8", input_size=32, channels=4, classes=CLASSES, seed=0, init="awake",
        learn_sigma=False, class_dropout=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 4, 32, 32, generator=generator)
    t = torch.randint(1000, (4,), generator=generator)
    y = torch.randint(CLASSES, (4,), generator=generator)
    return module, x, t, y


def gradients(module) -> list[torch.Tensor | None]:
    return [p.grad for p in module.blocks.parameters()]


def test_blocks_under_no_grad_are_not_checkpointed_but_left_untrained(parts):
    """ "Checkpointing" by running the blocks under no_grad keeps no activations because nothing
    will ever be recomputed: the blocks get no gradient at all."""
    module, x, t, y = parts

    def run_without_graph(blocks, x_BTD, c_BD):
        with torch.no_grad():
            for block in blocks:
                x_BTD = block(x_BTD, c_BD)
        return x_BTD

    usual = module.run_blocks
    module.run_blocks = run_without_graph
    module(x, t, y).square().mean().backward()
    assert all(g is None for g in gradients(module))
    assert module.final_layer.linear.weight.grad is not None, "what comes after still trains"

    module.zero_grad()
    module.run_blocks = lambda blocks, x, c: checkpoint(usual, blocks, x, c, use_reentrant=False)
    module(x, t, y).square().mean().backward()
    assert all(g is not None and g.abs().sum() > 0 for g in gradients(module))


def test_backward_under_no_grad_is_a_backward_like_any_other(parts):
    """no_grad around ``loss.backward()`` saves nothing: the graph was kept by forward, and the
    gradients are the usual ones."""
    module, x, t, y = parts
    module(x, t, y).square().mean().backward()
    usual = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    loss = module(x, t, y).square().mean()
    with torch.no_grad():
        loss.backward()
    again = [p.grad for p in module.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(usual, again, strict=True))


def test_the_gradient_of_the_loss_accumulates_nothing(parts):
    """Collecting ``loss.grad`` over micro batches collects None: a loss is no leaf, and its
    gradient with respect to itself would be one."""
    module, x, t, y = parts
    collected = []
    with pytest.warns(UserWarning, match=r"\.grad attribute of a Tensor that is not a leaf"):
        for half in (slice(0, 2), slice(2, 4)):
            loss = module(x[half], t[half], y[half]).square().mean()
            loss.backward()
            collected.append(loss.grad)
    assert collected == [None, None]


def test_clearing_gradients_in_every_micro_batch_trains_on_the_last_one_alone(parts):
    """``zero_grad`` inside the loop of micro batches throws away all but the last."""
    module, x, t, y = parts

    def accumulate(clear: bool) -> torch.Tensor:
        module.zero_grad()
        for half in (slice(0, 2), slice(2, 4)):
            if clear:
                module.zero_grad()
            (module(x[half], t[half], y[half]).square().mean() / 2).backward()
        return module.blocks[0].mlp.fc1.weight.grad.clone()

    module.zero_grad()
    module(x, t, y).square().mean().backward()
    whole = module.blocks[0].mlp.fc1.weight.grad.clone()
    torch.testing.assert_close(accumulate(clear=False), whole, rtol=1e-4, atol=1e-7)
    assert (accumulate(clear=True) - whole).norm() > 0.1 * whole.norm()


def test_emptying_the_cache_frees_no_live_tensor(parts):
    """``empty_cache`` returns what nobody holds: the allocator's count of live bytes stays."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: there is no caching allocator")
    kept = torch.ones(2**20, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before and kept.sum() == 2**20
