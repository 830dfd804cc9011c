"""Objectives and the model against the public references' numbers and closed forms."""

import functools
import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.data.feed import check_data
from harness.subjects import subject_of
from harness.subjects.dit.model import DiT
from harness.subjects.objectives import Flow, guide, guided, objective_of, spaced_steps
from strategies import initial

DRAWN = ("epsilon", "flow")
HERE = Path(__file__).parents[1]
GOLDEN = json.loads((HERE / "golden" / "reference_dit.json").read_text())
RECIPE = runpy.run_path(str(HERE / "golden" / "reference.py"))
SMALL, TIMES, fill, inputs, outputs = map(
    RECIPE.get, ("SMALL", "TIMES", "fill", "inputs", "outputs")
)


def small(name: str) -> DiT:
    return fill(DiT(**SMALL, learn_sigma=name == "epsilon")).eval()


def towards(name: str, model: DiT, labels, scale: float, channels: int | None = None):
    """The model guided towards labels."""
    subject = subject_of("DiT-T/8", check_data("digits"), objective=name)

    def ask(x, t_B, given):
        return subject.predict(model, x, t_B, given)

    leading = subject.data.channels if channels is None else channels
    return guided(ask, {"y": labels}, scale, leading)


def golden_loss(name: str, model: DiT) -> torch.Tensor:
    batch = inputs(len(TIMES))
    t_B = torch.tensor(TIMES) if name == "epsilon" else torch.tensor(TIMES) / 1000

    def predict(x, t):
        return model(x, t, batch["y"], batch["drop"])

    return objective_of(name).loss(predict, batch["x"], t_B, batch["noise"])


@pytest.mark.parametrize("name", DRAWN)
def test_losses_and_gradients_are_the_reference_s(name):
    """Gradients show above all that the variance term leaves the mean alone."""
    model = small(name)
    loss, expected = golden_loss(name, model), torch.tensor(GOLDEN[name]["loss"])
    assert loss.shape == (len(TIMES),) and expected.std() > 0
    torch.testing.assert_close(loss.detach(), expected, rtol=2e-5, atol=1e-5)
    loss.mean().backward()
    found = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
    assert found == pytest.approx(GOLDEN[name]["gradients"], rel=1e-3, abs=1e-6)


def test_a_perfect_prediction_costs_nothing():
    batch = inputs(2)
    t = torch.tensor([0.25, 0.75])
    x, noise = batch["x"], batch["noise"]
    assert not objective_of("flow").loss(lambda *_: x - noise, x, t, noise).any()
    # -1 asks for the lower variance bound, the true posterior's, so the divergence vanishes too.
    exact = torch.cat([noise, -torch.ones_like(noise)], dim=1)
    loss = objective_of("epsilon").loss(lambda *_: exact, x, torch.tensor([5, 999]), noise)
    torch.testing.assert_close(loss, torch.zeros(2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", DRAWN)
def test_a_draw_is_its_generator_s_and_covers_the_range(name):
    chances = (torch.Generator().manual_seed(seed) for seed in (1, 1, 2))
    draws = (objective_of(name).draw(chance, 4000, (4, 2, 2), "cpu") for chance in chances)
    (t, noise), (again, noise_again), (other, _) = draws
    assert torch.equal(t, again) and torch.equal(noise, noise_again) and not torch.equal(t, other)
    assert noise.shape == (4000, 4, 2, 2)
    assert noise.std().item() == pytest.approx(1, abs=0.02)
    top = 1000 if name == "epsilon" else 1
    assert t.dtype == (torch.int64 if name == "epsilon" else torch.float32)
    assert 0 <= t.min() < 0.01 * top and 0.99 * top < t.max() < top
    assert t.double().mean().item() == pytest.approx(top / 2, rel=0.03)


def test_spacing_is_the_reference_s_and_refuses_what_cannot_be():
    spaced = GOLDEN["epsilon"]["spaced"]
    assert {count: spaced_steps(int(count)) for count in spaced} == spaced
    for count in (0, 1, 1001):
        with pytest.raises(ValueError, match="give 2 to 1000"):
            spaced_steps(count)


def test_the_sampler_takes_those_steps(monkeypatch):
    noises = iter([RECIPE["step_noise"](taken) for taken in range(5)])
    monkeypatch.setattr(torch, "randn", lambda *_, **__: next(noises))
    predict = towards("epsilon", small("epsilon"), torch.tensor([3, 7]), 4.0, channels=3)
    found = objective_of("epsilon").sample(predict, inputs(2)["noise"], steps=5, generator=None)
    expected = torch.tensor(GOLDEN["epsilon"]["sample"])
    torch.testing.assert_close(found.flatten()[::7], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", DRAWN)
def test_guidance_one_is_the_plain_conditional_sample(name):
    model, batch = small(name), inputs(2)

    def drawn(scale: float) -> torch.Tensor:
        predict, chance = towards(name, model, batch["y"], scale), torch.Generator().manual_seed(0)
        return objective_of(name).sample(predict, batch["noise"], steps=3, generator=chance)

    found = [drawn(scale) for scale in (1, 1.0 + 1e-9, 3.0)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0], found[2], atol=1e-2)


def test_the_solver_of_flow_has_its_order():
    """dx/dt = x (1 + t) has x(1) = x(0) exp(1.5); half the step, a quarter of the error."""
    start = torch.ones(2, 1, 1, 1, dtype=torch.float64)

    def predict(x, t):
        return x * (1 + t.double().view(-1, 1, 1, 1))

    def error(steps):
        # The solver works in float32 slopes: few steps keep its rounding below the error.
        x = Flow().sample(predict, start, steps=steps, generator=None)
        return abs(x[0].item() - math.exp(1.5))

    assert math.log2(error(8) / error(16)) == pytest.approx(2, abs=0.25)


@pytest.mark.parametrize("name", DRAWN)
def test_objectives_take_a_video_as_they_take_the_same_numbers_of_an_image(name):
    """As many samples as channels: an axis that is taken for another would not be refused."""
    goal, shape, chance = objective_of(name), (4, 3, 8, 8), torch.Generator().manual_seed(0)
    twice = 2 if name == "epsilon" else 1

    def predict(x, t_B):
        return torch.cat([x * 0.3] * twice, 1)

    t_B, noise = goal.draw(chance, 4, shape, "cpu")
    t_B[0] = 0
    x = torch.randn((4, *shape), generator=chance)
    found = goal.loss(predict, x, t_B, noise)
    torch.testing.assert_close(found, goal.loss(predict, x.flatten(2, 3), t_B, noise.flatten(2, 3)))
    if name == "flow":  # deterministic
        drawn = goal.sample(predict, noise, steps=2, generator=None)
        flat = goal.sample(predict, noise.flatten(2, 3), steps=2, generator=None)
        torch.testing.assert_close(drawn.flatten(2, 3), flat)


# ---- the model ----


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
    (table,) = initial.build(subject, 0, "awake").pos_embed.detach()
    expected = GOLDEN["structure"]["pos_embed_512"]
    assert table.shape == (1024, 384)
    assert RECIPE["positions"](table) == pytest.approx(expected, abs=1e-6)


def test_awake_gives_every_weight_a_gradient_where_adaln_zero_does_not(batch):
    batch["noise"] = torch.randn(4, 4, 32, 32)
    reached = {}
    for init in ("adaln_zero", "awake"):
        model = initial.build(subject_of("DiT-T/8", check_data("digits")), 0, init)
        (call(model, batch) - 1).square().mean().backward()
        trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        reached[init] = {n for n, p in trainable.items() if p.grad is not None and p.grad.any()}
    assert reached["awake"] == set(trainable)
    assert len(reached["adaln_zero"]) < 5


def test_withheld_labels_read_the_null_row(model, batch):
    drop = torch.tensor([True, False, True, False])
    found = call(model.train(), batch, drop)
    null = torch.where(drop, 10, batch["y"])
    expected = model.eval()(batch["noise"], batch["t"], null)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(expected, call(model, batch))


def test_norms_have_the_paper_s_epsilon_and_no_weights():
    """Told by attribute: 1e-5 in its place would pass for rounding in every output above."""
    norms = [m for m in DiT(**SMALL).modules() if isinstance(m, nn.LayerNorm)]
    assert {(m.eps, m.weight) for m in norms} == {(1e-6, None)} and len(norms) == 5
