"""The classifier that says which digit a sample looks like."""

from __future__ import annotations

import re

import pytest
import torch
from sklearn.datasets import load_digits

from harness import ROOT
from harness.data.feed import open_data
from harness.report.figures.samples import share_alike
from harness.sampling import measure

HALF = 898


def test_it_tells_digits_that_it_has_not_seen():
    images, labels = load_digits(return_X_y=True)
    seen = measure.classifier(images[:HALF], labels[:HALF])
    right = 100 * seen.score(images[HALF:], labels[HALF:])
    (said,) = re.findall(
        r"right on (\d+) % of the half", (ROOT / "docs/how-to/train.md").read_text()
    )
    assert right == pytest.approx(int(said), abs=0.6)


def test_a_latent_is_the_pixels_that_it_was_made_of():
    dataset = open_data("digits", "cpu")
    images, labels = load_digits(return_X_y=True)
    latents, _ = dataset.x_all[:50], dataset.y_all[:50]
    assert torch.equal(torch.from_numpy(measure.pixels_of(latents)).double(),
                       torch.from_numpy(images[:50]))  # fmt: skip
    assert share_alike(measure.recognised(latents), labels[:50].tolist()) >= 0.98


def test_noise_is_hardly_a_digit():
    noise = torch.randn(200, 4, 32, 32, generator=torch.manual_seed(0))
    asked = [index % 10 for index in range(200)]
    assert share_alike(measure.recognised(noise), asked) < 0.3


def test_shares_are_of_all_samples():
    assert share_alike([1, 2, 3, 4], [1, 2, 0, 0]) == 0.5
    assert share_alike(None, [1]) is None and share_alike([1], [1, 2]) is None
