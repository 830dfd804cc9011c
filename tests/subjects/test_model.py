"""The model against the public reference's numbers, and the promises its strategies build on."""

import functools
import json
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.data.feed import check_data
from harness.subjects import subject_of
from harness.subjects.dit.model import DiT
from harness.subjects.objectives import guide
from tests.made.dits import build

HERE = Path(__file__).parents[1]
GOLDEN = json.loads((HERE / "golden" / "reference_dit.json").read_text())
RECIPE = runpy.run_path(str(HERE / "golden" / "reference.py"))
SMALL, fill, inputs, outputs = (RECIPE[n] for n in ("SMALL", "fill", "inputs", "outputs"))
DIGITS = dict(input_size=32, channels=4, classes=10)


def with_cfg(model: DiT, x, t, y, scale: float, channels: int = 3) -> torch.Tensor:
    """The reference's ``forward_with_cfg``, by our ``guide``: the second half has null labels."""
    first = x.chunk(2)[0]
    out = model(torch.cat([first, first]), t, y)
    guided = guide(out[:, :channels], scale)
    return torch.cat([torch.cat([guided, guided]), out[:, channels:]], dim=1)


@pytest.fixture
def model() -> DiT:
    """Two blocks of width 64 with golden weights, in eval mode, and the reference's guidance."""
    made = fill(DiT(**SMALL)).eval()
    made.forward_with_cfg = functools.partial(with_cfg, made)
    return made


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    return inputs(4) | {"t": torch.tensor([0, 17, 500, 999])}


def call(model: DiT, batch: dict, drop: torch.Tensor | None = None) -> torch.Tensor:
    return model(batch["noise"], batch["t"], batch["y"], drop)


@pytest.mark.parametrize("name", ["forward", "forward_fractional", "forward_with_cfg"])
def test_outputs_are_the_reference_s(model, name):
    expected = torch.tensor(GOLDEN["epsilon"]["outputs"][name])
    found = torch.tensor(outputs(model)[name])
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_checkpoints_of_the_reference_fit_strictly():
    with torch.device("meta"):
        state = DiT().state_dict()
    assert {n: list(v.shape) for n, v in state.items()} == GOLDEN["structure"]["state_dict"]
    assert list(state) == list(GOLDEN["structure"]["state_dict"])


def test_positions_of_512_pixels_are_the_reference_s():
    subject = subject_of("DiT-S/2:depth=1", check_data("synthetic:64"))
    (table,) = subject.build(0, "awake").pos_embed.detach()
    expected = GOLDEN["structure"]["pos_embed_512"]
    assert table.shape == (1024, 384)
    assert RECIPE["positions"](table) == pytest.approx(expected, abs=1e-6)


def test_awake_gives_every_weight_a_gradient_where_adaln_zero_does_not(batch):
    batch["noise"] = torch.randn(4, 4, 32, 32)
    reached = {}
    for init in ("adaln_zero", "awake"):
        model = build("DiT-T/8", **DIGITS, seed=0, init=init)
        (call(model, batch) - 1).square().mean().backward()
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        reached[init] = {n for n, p in trainable.items() if p.grad is not None and p.grad.any()}
    assert reached["awake"] == set(trainable)
    assert len(reached["adaln_zero"]) < 5


def test_build_depends_on_its_seed_alone():
    torch.manual_seed(1)
    first = build("DiT-T/4", **DIGITS, seed=3, init="awake").state_dict()
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again = build("DiT-T/4", **DIGITS, seed=3, init="awake").state_dict()
    other = build("DiT-T/4", **DIGITS, seed=4, init="awake").state_dict()
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not torch.equal(first["blocks.0.mlp.fc1.weight"], other["blocks.0.mlp.fc1.weight"])
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "build moved the caller's random state"


def test_withheld_labels_read_the_null_row(model, batch):
    drop = torch.tensor([True, False, True, False])
    found = call(model.train(), batch, drop)
    null = torch.where(drop, 10, batch["y"])
    expected = model.eval()(batch["noise"], batch["t"], null)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(expected, call(model, batch))


def test_guidance_moves_only_the_channels_it_names():
    out = torch.randn(4, 8, 2, 2)
    conditional, unconditional = out.chunk(2)
    found = guide(out, 4.0, 3)
    expected = unconditional + 4.0 * (conditional - unconditional)
    torch.testing.assert_close(found[:, :3], expected[:, :3])
    assert torch.equal(found[:, 3:], conditional[:, 3:])
    torch.testing.assert_close(guide(out, 4.0), expected)
    torch.testing.assert_close(guide(out, 1.0), conditional)


def test_norms_have_the_paper_s_epsilon_and_no_weights():
    """Told by attribute: 1e-5 in its place would pass for rounding in every output above."""
    norms = [m for m in DiT(**SMALL).modules() if isinstance(m, nn.LayerNorm)]
    assert {(m.eps, m.weight) for m in norms} == {(1e-6, None)} and len(norms) == 5
