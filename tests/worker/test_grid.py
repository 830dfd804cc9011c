"""The picture of samples: its size, its pixels, and that it is replaced whole or not at all."""

import numpy as np
import pytest
import torch
from PIL import Image

from harness.worker.audit import FRAME, GAP, write_grid


def test_digits_are_grey_widened_and_in_reading_order(tmp_path):
    x = torch.linspace(-1, 1, 5).view(5, 1, 1, 1).expand(5, 4, 32, 32)
    write_grid(x, tmp_path / "grid.png", 3)
    with Image.open(tmp_path / "grid.png") as image:
        pixels = np.array(image)
    assert pixels.shape == (2 * 96 + GAP, 3 * 96 + 2 * GAP)
    step = 96 + GAP
    found = [int(pixels[r * step + 5, c * step + 5]) for r in range(2) for c in range(3)]
    assert found == [0, 64, 128, 191, 255, FRAME]
    assert (pixels[:96, 96 : 96 + GAP] == FRAME).all()


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "grid.png"
    write_grid(torch.full((1, 4, 8, 8), 1.0), path, 1)
    before = path.read_bytes()

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_grid(torch.full((1, 4, 8, 8), -1.0), path, 1)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_samples_of_a_model_that_diverged_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the model has diverged"):
        write_grid(torch.full((1, 4, 8, 8), torch.nan), tmp_path / "grid.png", 1)
    assert not list(tmp_path.iterdir())
