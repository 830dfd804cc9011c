"""Streamed blocks in a prediction: two of them on the device, all on the host, copies counted."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import predictions

from harness.spec import Spec

SPEC = Spec(recipe="", model="DiT-S/4:depth=8", data="synthetic", global_batch=2, device="cuda")
BLOCK = 4 * (4 * 384**2 + 2 * 4 * 384**2 + 6 * 384**2)
"""Bytes of a block's matrices in float32; its biases are less than a hundredth of that."""


def test_the_device_holds_two_of_the_streamed_blocks(tmp_path):
    recipes = ["lora", "block_swap:blocks=6+lora", "block_swap:blocks=8", "bf16+cast+lora"]
    specs = [dataclasses.replace(SPEC, recipe=f"single+{recipe}") for recipe in recipes]
    cases = [dataclasses.asdict(spec) for spec in specs]
    plain, frozen, trained, cast = predictions(cases, tmp_path)
    for found in (plain, frozen, trained, cast):
        assert found["method"] == "trace", found["reason"]

    def weights(found) -> int:
        return found["steady"]["categories"]["parameters"]

    def copied(found, phase: str) -> int:
        done = [w for w in found["work"] if (w["kind"], w["phase"]) == ("streamed", phase)]
        return sum(w["count"] * w["bytes"] for w in done)

    assert weights(plain) - weights(frozen) == pytest.approx((6 - 2) * BLOCK, rel=0.02)
    held = (found["host_steady"]["bytes"] for found in (frozen, plain))
    assert next(held) - next(held) == pytest.approx(6 * BLOCK, rel=0.05)
    assert copied(plain, "forward") == 0
    # The last of them waits on the device for backward to come.
    assert copied(frozen, "forward") == pytest.approx(6 * BLOCK, rel=0.02)
    assert copied(frozen, "backward") == pytest.approx(5 * BLOCK, rel=0.02)
    # What works on tokens, two thirds of a block, takes a byte in the place of four.
    assert weights(plain) - weights(cast) == pytest.approx(8 * BLOCK * 2 / 3 * 3 / 4, rel=0.03)
    # Where they train a gradient leaves for each weight; moments are in host memory.
    assert copied(trained, "backward") == pytest.approx((7 + 8) * BLOCK, rel=0.02)
    host = trained["host_steady"]["categories"]
    assert host["optimizer_state"] == pytest.approx(2 * 8 * BLOCK, rel=0.02)
    assert trained["steady"]["categories"]["optimizer_state"] < 2 * BLOCK
