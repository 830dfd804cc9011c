"""Caches of other trainers, in their real formats: read, told apart by size, trained from, and
refused by name where they are of another model or not whole."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.data.brought import Cached
from harness.data.feed import stamp
from harness.resolve import resolve
from harness.spec import Spec, located
from strategies.base import BadInput
from tests.made import caches
from tests.made.publics import miniature

SMALL, LARGE = (1, 8, 8), (1, 8, 16)
VIDEOS = ("wan2.1-1.3b", "hunyuanvideo", "ltx-video-2b", "cogvideox-5b")


def sizes(model: str) -> dict[tuple[int, int, int], int]:
    frames = 2 if model in VIDEOS else 1
    return {(frames, 8, 8): 1, (frames, 8, 16): 3}


def of(model: str, data: str, **change) -> Spec:
    """The miniature of a model on a cache."""
    plain = dict(data=data, resolution="", frames=0, text=0)
    return miniature(model, "single", **plain | change)


def made(model: str, folder: Path, **more) -> str:
    maker = caches.musubi if model in caches.MUSUBI else caches.finetrainers
    return maker(folder, model, sizes(model), **more)


def opened(spec: Spec) -> Cached:
    subject = resolve(spec).subject
    return Cached(subject.data, subject.reader(), "cpu")


# ---- what is read ----


@pytest.mark.parametrize("model", [*caches.MUSUBI, *caches.FINETRAINERS])
def test_a_model_trains_two_steps_from_a_cache(model, tmp_path, train_here):
    spec = of(model, made(model, tmp_path / "cache"))
    subject = resolve(spec).subject
    assert subject.data.size == 3 and (subject.space.height, subject.space.width) == (8, 16)
    run, log = train_here(spec, 2)
    assert len(log.losses) == 2 and all(np.isfinite(log.losses))
    assert type(run.feed.dataset) is Cached
    assert f"samples: 3 of the cache, those of {subject.size_in_words}" in run.notes
    x, given = run.feed.dataset.fetch(np.array([0, 2]))
    assert x.shape == (2, *subject.data.sample_shape) and x.dtype == torch.float32
    wanted = subject.family.conditions(subject.config, subject.space)
    assert {n: tuple(t.shape[1:]) for n, t in given.items()} == {
        n: shape for n, (shape, _) in wanted.items()
    }


def test_another_bucket_is_trained_where_it_is_asked_for(tmp_path):
    data = made("wan2.1-1.3b", tmp_path)
    largest, small = resolve(of("wan2.1-1.3b", data)), of("wan2.1-1.3b", data, resolution="64")
    assert largest.subject.size_in_words == "64x128 of 5 frames, 512 tokens of text"
    subject = resolve(small).subject
    assert subject.size_in_words.startswith("64x64 of 5 frames") and subject.data.size == 1
    assert subject.identity != largest.subject.identity
    with pytest.raises(BadInput, match=r"no samples of 96 of 5; give .*64x128 of 5 frames, 64x64"):
        resolve(of("wan2.1-1.3b", data, resolution="96", frames=5))
    with pytest.raises(BadInput, match=r"text is 8, and musubi:.* leave --text out"):
        resolve(of("wan2.1-1.3b", data, text=8))


def test_values_are_those_of_the_files_in_the_layout_of_the_class(tmp_path):
    data = made("qwen-image", tmp_path, tokens=(3, 5))
    x, given = opened(of("qwen-image", data)).fetch(np.array([0, 1]))
    latent = load_file(tmp_path / "cat1_0128x0064_qi.safetensors")["latents_1x8x16_bfloat16"]
    # A token is 2 x 2 elements, channel by channel, rows of tokens from the top.
    second = latent.float()[:, 0, 0:2, 2:4].reshape(-1)
    assert torch.equal(x[0, 1], second) and x.shape == (2, 32, 16)
    text = load_file(tmp_path / "cat2_qi_te.safetensors")["varlen_vl_embed_bfloat16"].float()
    assert given["text"].shape == (2, 5, 16) and torch.equal(given["text"][1, : len(text)], text)
    assert given["mask"].sum(1).tolist() == [5, 3] and not given["text"][1, 3:].any()


def test_moments_give_their_mean_normalised_by_what_lies_beside_it(tmp_path):
    data = made("ltx-video-2b", tmp_path)
    x, _ = opened(of("ltx-video-2b", data)).fetch(np.array([0]))
    held = torch.load(tmp_path / "finetrainers-precomputed-data/latent-1.pt")
    mean, deviation = (held[f"latents_{name}"].view(-1, 1, 1, 1) for name in ("mean", "std"))
    wanted = (held["latents"][0, :8] - mean) / deviation
    torch.testing.assert_close(x[0], wanted.flatten(1).T)
    video = made("cogvideox-5b", tmp_path / "other")
    x, _ = opened(of("cogvideox-5b", video)).fetch(np.array([0]))
    held = torch.load(tmp_path / "other/finetrainers-precomputed-data/latent-1.pt")["latents"]
    assert torch.equal(x, held[:, :, :4])


def test_what_is_expected_is_read_ahead_and_equal(tmp_path):
    data = made("flux2-dev", tmp_path)
    plain, ahead = opened(of("flux2-dev", data)), opened(of("flux2-dev", data))
    indices = np.array([2, 0])
    ahead.expect(indices)
    for one, other in zip(plain.fetch(indices), ahead.fetch(indices), strict=True):
        assert (one == other).all() if torch.is_tensor(one) else one.keys() == other.keys()
    assert not torch.equal(plain.fetch(np.array([0]))[0], plain.fetch(np.array([1]))[0])


def test_a_folder_s_change_is_another_measurement(tmp_path, monkeypatch):
    data = made("z-image", tmp_path / "cache")
    before = stamp(data)
    caches.musubi_sample(tmp_path / "cache", "z-image", 9, (1, 8, 8), 5)
    assert before and stamp(data) != before and resolve(of("z-image", data)).subject.data.size == 3
    monkeypatch.chdir(tmp_path)
    assert located({"data": "musubi:cache"})["data"] == data


# ---- what is refused, before any process starts ----


def change(path: Path, edit, **metadata: str) -> None:
    """Write a safetensors file again with other tensors, or with other metadata."""
    held = dict(load_file(path))
    with path.open("rb") as file:
        head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    path.unlink()
    save_file(edit(held), path, metadata=head["__metadata__"] | metadata)


LATENT, TEXT = "cat1_00000-005_0128x0064_wan.safetensors", "cat1_wan_te.safetensors"


def wrong_architecture(folder: Path) -> None:
    change(folder / LATENT, lambda held: held, architecture="framepack")


def two_architectures(folder: Path) -> None:
    change(folder / TEXT, lambda held: held, architecture="qwen_image")


def wrong_shape(folder: Path) -> None:
    change(folder / LATENT, lambda held: {k: v[:3].contiguous() for k, v in held.items()})


def wrong_width(folder: Path) -> None:
    change(folder / TEXT, lambda held: {k: v[:, :9].contiguous() for k, v in held.items()})


def missing_text(folder: Path) -> None:
    (folder / TEXT).unlink()


def no_text_in_it(folder: Path) -> None:
    change(folder / TEXT, lambda held: {"clipL_bfloat16": torch.zeros(8)})


def first_image(folder: Path) -> None:
    change(folder / LATENT, lambda held: held | {"latents_image_2x8x16_bfloat16": torch.ones(1)})


def odd_sides(folder: Path) -> None:
    cut = {"latents_2x8x15_bfloat16": torch.zeros(4, 2, 8, 15)}
    change(folder / LATENT, lambda held: cut)


def cut_short(folder: Path) -> None:
    path = folder / LATENT
    path.write_bytes(path.read_bytes()[:-8])


def no_header(folder: Path) -> None:
    (folder / LATENT).write_bytes(b"no safetensors at all")


def renamed(folder: Path) -> None:
    (folder / LATENT).rename(folder / "cat1.safetensors")


def newer(folder: Path) -> None:
    change(folder / LATENT, lambda held: held, format_version="2.0")


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        (wrong_architecture, f"{LATENT} is for architecture framepack, which no .* one of h"),
        (
            two_architectures,
            f"{TEXT} is for architecture qwen_image, but its latents are for wan; cache",
        ),
        (wrong_shape, rf"{LATENT}: latents_2x8x16_bfloat16 has shape \[3, .* have 4 channels;"),
        (wrong_width, rf"{TEXT}: varlen_t5_bfloat16 has shape \[5, 9\], .* text of width 16; is"),
        (missing_text, f"{TEXT} is missing, the text of {LATENT}; cache text encoder outputs"),
        (no_text_in_it, rf"{TEXT} has no varlen_t5, but clipL_bfloat16 \[8\]; cache the text"),
        (first_image, f"{LATENT} has latents_image_2x8x16_bfloat16, a control or first image"),
        (odd_sides, "a latent of 2 x 8 x 15; the model takes sides that are multiples of 2"),
        (cut_short, f"{LATENT} has [0-9]+ of [0-9]+ bytes; write its cache again"),
        (no_header, f"{LATENT} is not a readable safetensors file"),
        (renamed, "cat1.safetensors does not have a name of a musubi-tuner cache; it should hold"),
        (newer, "has format_version '2.0', and only 1.0.1 is supported"),
    ],
)
def test_a_sabotaged_cache_is_refused_by_name(sabotage, words, tmp_path):
    spec = of("wan2.1-1.3b", made("wan2.1-1.3b", tmp_path))
    resolve(spec)
    sabotage(tmp_path)
    with pytest.raises(BadInput, match=words):
        resolve(spec)


def test_a_cache_of_another_model_is_refused(tmp_path):
    data = made("wan2.1-1.3b", tmp_path)
    with pytest.raises(BadInput, match=r"a cache of wan, .*qwen-image .* of WanTransformer3DModel"):
        resolve(of("qwen-image", data))
    tiny = dataclasses.replace(of("qwen-image", data), model="DiT-T/8", set="")
    with pytest.raises(BadInput, match=r"a cache of a public model's latents and texts"):
        resolve(tiny)
    with pytest.raises(BadInput, match=r"no folder .*nowhere; write musubi:FOLDER, it should hold"):
        resolve(of("qwen-image", f"musubi:{tmp_path}/nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"empty has no caches of finetrainers; it should hold late"):
        resolve(of("flux-dev", f"finetrainers:{tmp_path}/empty"))


class Foreign:
    """What no loader of tensors may make."""

    def __reduce__(self):
        return (Path.touch, (Path("made-by-a-pickle"),))


def foreign(root: Path) -> None:
    torch.save({"latents": Foreign()}, root / "latent-1.pt")


def plain_pickle(root: Path) -> None:
    (root / "latent-1.pt").write_bytes(pickle.dumps(Foreign()))


def half(root: Path) -> None:
    (root / "condition-1.pt").unlink()


def other_key(root: Path) -> None:
    torch.save({"prompt": torch.zeros(1, 8, 16)}, root / "condition-1.pt")


def other_channels(root: Path) -> None:
    torch.save({"latents": torch.zeros(1, 12, 2, 8, 16)}, root / "latent-1.pt")


def no_mask(root: Path) -> None:
    texts = torch.load(root / "condition-1.pt")
    texts["encoder_attention_mask"] = texts["encoder_attention_mask"][:, :5]
    torch.save(texts, root / "condition-1.pt")


@pytest.mark.parametrize(
    ("sabotage", "words"),
    [
        (foreign, "latent-1.pt has more than tensors, and other pickled objects are not load"),
        (plain_pickle, "latent-1.pt has more than tensors, and other pickled"),
        (half, "condition-1.pt is missing; precompute again, or delete its partner"),
        (other_key, "condition-1.pt has no encoder_hidden_states, but prompt; precompute again"),
        (other_channels, r"latents has shape \[12, 2, 8, 16\], .* have 8 channels \(or 16, as mom"),
        (no_mask, r"encoder_attention_mask has shape \[5\], its text \[8, 16\]; cache the text"),
    ],
)
def test_precomputed_files_are_tensors_or_refused(sabotage, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = of("ltx-video-2b", made("ltx-video-2b", tmp_path / "cache"))
    resolve(spec)
    sabotage(tmp_path / "cache/finetrainers-precomputed-data")
    with pytest.raises(BadInput, match=words):
        resolve(spec)
    assert not (tmp_path / "made-by-a-pickle").exists()
