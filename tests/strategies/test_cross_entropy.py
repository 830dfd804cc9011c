"""A loss over a vocabulary: each way of computing it gives the plain one's, and its gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import TINY

from harness.resolve import resolve
from harness.system import requirements
from strategies import initial
from strategies.losses import functions

WORDS = 512
TOKENS = dataclasses.replace(
    TINY, model=f"DiT-T/8:tokens={WORDS}", objective="masked", data="synthetic"
)


def gradients(function) -> list[torch.Tensor]:
    """The loss, and its gradients by hidden states, weight and bias."""
    made = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(s, generator=made) for s in ((37, 16), (WORDS, 16), (WORDS,)))
    given = [t.requires_grad_() for t in (x, weight, bias)]
    targets = torch.randint(0, WORDS, (37,), generator=made)
    targets[::3] = functions.IGNORED
    loss = function(*given, targets)
    return [loss.detach(), *torch.autograd.grad(loss, given)]


@pytest.mark.parametrize("function", [functions.chunked(4), functions.fused])
def test_loss_and_gradients_are_those_of_all_logits(function):
    for found, exact in zip(gradients(function), gradients(functions.full), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["cross_entropy", "cross_entropy:kind=fused", "checkpoint"])
def test_a_training_over_tokens_is_the_same_with_each(text, train_here):
    usual = train_here(TOKENS, 3)
    other = train_here(dataclasses.replace(TOKENS, recipe=f"single+{text}"), 3)
    for mine, theirs in zip(other.log.losses, usual.log.losses, strict=True):
        assert float(mine) == pytest.approx(float(theirs), rel=1e-5)
    for mine, theirs in zip(other.log.norms, usual.log.norms, strict=True):
        assert float(mine) == pytest.approx(float(theirs), rel=1e-4)


def test_a_model_s_loss_is_that_of_its_logits():
    subject = resolve(TOKENS).subject
    module = initial.build(subject, 0, "awake").eval()
    x, y = (t[:2] for t in subject.samples().values())
    assert subject.size_in_words == "16 tokens"
    wanted = torch.where(torch.arange(x.shape[1]) % 2 == 0, x, functions.IGNORED)
    shown, t = torch.where(wanted < 0, x, -1), torch.tensor([0.3, 0.6])
    logits = module(shown, t, y)
    assert logits.shape == (*x.shape, WORDS) and logits.std() > 0
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="sum")
    found = subject.predict(module, torch.stack([shown, wanted], 1), t, {"y": y})
    torch.testing.assert_close(found, loss.reshape(1) / x.numel())


def test_a_loss_that_torch_lacks_names_another(monkeypatch):
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None)
    lack = requirements.lacks("linear_cross_entropy", None, TOKENS)
    assert "no linear_cross_entropy" in lack.text and "kind=chunked" in lack.hint
