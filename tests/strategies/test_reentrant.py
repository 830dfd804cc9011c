"""Reentrant checkpoints of public models: what blocks are given in tuples gets its gradients."""

from __future__ import annotations

import pytest
from conftest import forget, trained_here

from tests.made import families


@pytest.mark.parametrize("model", ["mochi", "flux-dev", "sana-1.6b"])
def test_a_public_model_trains_as_it_does_with_a_graph(model):
    """Mochi's rotary frequencies are trained, and come to its blocks as a pair."""
    try:
        plain, other = (
            families.of_one(trained_here, model, f"single+checkpoint{how}")
            for how in ("", ":reentrant=on")
        )
    finally:
        forget()
    assert other == pytest.approx(plain, rel=1e-5)
