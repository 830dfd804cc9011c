"""A DiT on video latents, against the image model, another library's positions and closed forms."""

import dataclasses

import pytest
import torch
from conftest import TINY
from diffusers.models.embeddings import get_3d_sincos_pos_embed
from PIL import Image
from torch import nn

from harness.data.feed import check_data
from harness.resolve import resolve
from harness.subjects import subject_of
from harness.subjects.dit.model import sincos_table
from harness.subjects.objectives import OBJECTIVES
from harness.worker.training import Training
from strategies.base import BadInput
from strategies.subject import Shaping, Subject

VIDEO = dataclasses.replace(
    TINY, model="DiT-T/8:depth=2", frames=4, data="synthetic:32", global_batch=4, recipe="single"
)


def subject(model: str, side: int, frames: int = 0, **more) -> Subject:
    shaping = Shaping(frames=frames, data=more.pop("data", "synthetic"))
    return subject_of(model, check_data(f"synthetic:{side}"), shaping=shaping, **more)


def awake(of: Subject) -> nn.Module:
    return of.build(0, "awake").eval()


def test_positions_are_another_library_s():
    wanted = get_3d_sincos_pos_embed(64, 4, 3).flatten(0, 1)
    found = torch.from_numpy(sincos_table(64, 4, 3))
    torch.testing.assert_close(found, wanted.double(), rtol=0, atol=1e-6)
    table = awake(subject("DiT-T/8", 32, 3)).pos_embed[0]
    torch.testing.assert_close(table, torch.from_numpy(sincos_table(128, 4, 3)).float())
    assert len({tuple(row) for row in table.tolist()}) == 3 * 16, "each token has a place"


def test_one_frame_is_the_image_model():
    assert subject("DiT-T/8", 32, frames=1) == subject("DiT-T/8", 32)


def test_a_video_costs_what_an_image_of_as_many_tokens_does():
    video, image = subject("DiT-T/4", 16, frames=4), subject("DiT-T/4", 32)
    assert video.dimensions == image.dimensions and video.dimensions.tokens == 64
    assert video.train_flops(3) == image.train_flops(3) > 0
    assert video.parameters == image.parameters == video.survey.parameters
    assert video.sizes == image.sizes and video.sizes.total == video.survey.sizes.total
    assert video.size_in_words == "128x128 of 4 frames"


def test_each_frame_is_cut_into_patches_and_put_together_as_an_image():
    video, image = (awake(subject("DiT-T/8", 32, frames=n)) for n in (3, 1))
    x = torch.randn(2, 4, 3, 32, 32)
    for frame, tokens in enumerate(video.x_embedder(x).chunk(3, dim=1)):
        torch.testing.assert_close(tokens, image.x_embedder(x[:, :, frame]))
    made = torch.randn(2, 3 * 16, 8 * 8 * 8)
    whole = video.unpatchify(made)
    assert whole.shape == (2, 8, 3, 32, 32)
    for frame, patches in enumerate(made.chunk(3, dim=1)):
        assert torch.equal(whole[:, :, frame], image.unpatchify(patches))


def test_weights_are_an_image_model_s_and_every_frame_sees_the_others():
    video, image = (awake(subject("DiT-T/8", 32, frames=n)) for n in (3, 1))
    left = video.load_state_dict(
        {n: p for n, p in image.state_dict().items() if n != "pos_embed"}, strict=False
    )
    assert left == (["pos_embed"], [])
    x, t, y = torch.randn(1, 4, 3, 32, 32), torch.tensor([5]), torch.tensor([1])
    before = video(x, t, y)
    x[:, :, 2] += 1
    moved = (video(x, t, y) - before).abs().amax(dim=(0, 1, 3, 4))
    assert before.shape == (1, 8, 3, 32, 32) and moved.min() > 1e-5


def test_a_rank_s_stripe_has_its_own_tokens_and_positions():
    of = subject("DiT-T/8", 32, frames=3)
    model, x = awake(of), torch.randn(1, 4, 3, 32, 32)
    tokens = (model.x_embedder(x) + model.positions()).unflatten(1, (3, 4, 4))
    for part in range(of.most_stripes // 2):
        of.take_part(model, part, 2)
        mine = model.x_embedder(of.cut(x, part, 2)) + model.positions()
        torch.testing.assert_close(mine, tokens[:, :, 2 * part : 2 * part + 2].flatten(1, 3))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_take_a_video_as_they_take_the_same_numbers_of_an_image(name):
    """As many samples as channels: an axis that is taken for another would not be refused."""
    goal, shape, chance = OBJECTIVES[name], (4, 3, 8, 8), torch.Generator().manual_seed(0)
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


@pytest.mark.parametrize(
    ("model", "frames", "data", "words"),
    [
        ("DiT-T/8", 9, "digits", "data is digits, which are images"),
        ("DiT-T/8:width=72,heads=2", 9, "synthetic", "has width 72, .*divides by 16"),
        ("DiT-T/8:tokens=64", 9, "synthetic", "frames is 9, which model DiT-T/8:tokens=64 does"),
    ],
)
def test_what_no_video_can_be_is_refused(model, frames, data, words):
    goal = "masked" if "tokens" in model else "epsilon"
    with pytest.raises(BadInput, match=words):
        subject(model, 32, frames, data=data, objective=goal)


def test_sizes_that_are_sought_are_of_frames_and_of_sides():
    of = resolve(VIDEO).subject
    asked, times = of.samples_up("frames")[7]
    assert asked == {"frames": 8} and times == 2
    asked, times = of.samples_up("resolution")[7]
    assert asked == {"data": "synthetic:64"} and times == 4
    small = resolve(dataclasses.replace(VIDEO, **asked)).subject
    assert small.data.sample_shape == (4, 4, 64, 64) and small.frames == 4


def test_a_video_is_trained_with_an_average_and_drawn(train_here, draw_here, tmp_path):
    spec = dataclasses.replace(VIDEO, ema=0.9, recipe="single+checkpoint")
    run, log = train_here(spec, 3)
    assert run.feed.together == 1 and log.all_losses(run)[-1] != log.all_losses(run)[0]
    drawn = Training(folder=None, samples=tmp_path / "lines.png", sample_steps=2)
    drawn.finish(run, resolve(spec))
    # Lines of 4 frames, of 8 classes: each side widened to 96, with gaps of 4.
    assert Image.open(tmp_path / "lines.png").size == (4 * 100 - 4, 8 * 100 - 4)
    spec = dataclasses.replace(
        VIDEO, workload="sample", objective="flow", ema=0, sampler_steps=2, init="awake"
    )
    drawing = draw_here(spec)
    assert drawing.drawn.shape == (4, 4, 4, 32, 32) and drawing.drawn.isfinite().all()
