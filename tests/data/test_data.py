"""What a step consumes depends on (seed, step) alone; bad data is refused by name."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.data.datasets import open_data
from harness.data.feed import Feed, check_data, sample_order
from harness.subjects.objectives import objective_of
from strategies.subject import DataFacts

COUNT = 12


def write(root: Path, name: str, latent, label) -> None:
    np.save(root / "imagenet256_features" / f"{name}.npy", latent)
    np.save(root / "imagenet256_labels" / f"{name}.npy", label)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve latents as fast-DiT writes them; sample n holds n throughout and has label 10 n."""
    for part in ("features", "labels"):
        (tmp_path / f"imagenet256_{part}").mkdir()
    for n in range(COUNT):
        write(tmp_path, str(n), np.full((1, 4, 8, 8), n, np.float32), np.array([10 * n]))
    return tmp_path


def feeds(name: str, objective: str, processes: int, micro: int, **change) -> list[Feed]:
    dataset = open_data(name, "cpu")
    settings = dict(seed=3, global_batch=12, shares=processes, micro_batch=micro) | change
    return [
        Feed(dataset=dataset, draw=objective_of(objective).draw, share=rank, **settings)
        for rank in range(processes)
    ]


def consumed(parts: list[Feed], step: int) -> dict[str, torch.Tensor]:
    """The whole global batch, joined from all processes and micro batches."""
    batches = [b for part in parts for b in part.micro_batches(step)]
    assert all(len(b.x) == parts[0].micro_batch for b in batches)
    each = [{"x": b.x, "t": b.t, "noise": b.noise, **b.conditions} for b in batches]
    joined = {name: torch.cat([b[name] for b in each]) for name in each[0]}
    return joined | {"positions": torch.from_numpy(np.concatenate([b.positions for b in batches]))}


# ---- order --------------------------------------------------------------------------------------


def test_each_epoch_visits_every_sample_once_in_another_order():
    epochs = sample_order(0, 10, 0, 30).reshape(3, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_is_a_window_on_one_sequence():
    found = sample_order(1, 10, 5, 37)
    assert found.dtype == np.int64 and np.array_equal(found, sample_order(1, 10, 0, 50)[5:42])


# ---- feed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["epsilon", "flow"])
@pytest.mark.parametrize("processes, micro", [(1, 4), (2, 3), (12, 1)])
def test_a_step_consumes_the_same_however_it_is_cut(objective, processes, micro):
    for step in (0, 7):
        whole = consumed(feeds("digits", objective, 1, 12), step)
        cut = consumed(feeds("digits", objective, processes, micro), step)
        assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_what_is_drawn_together_is_given_however_a_step_is_cut():
    whole = consumed(feeds("digits", "epsilon", 1, 12, together=5), 4)
    cut = consumed(feeds("digits", "epsilon", 4, 3, together=5), 4)
    assert all(torch.equal(cut[name], values) for name, values in whole.items())
    rows = {tuple(noise.flatten().tolist()) for noise in whole["noise"]}
    assert len(rows) == 12, "each sample has noise of its own"


def test_steps_and_seeds_differ():
    (feed,), (other,) = (feeds("digits", "epsilon", 1, 12, seed=s) for s in (3, 4))
    draws = [consumed([f], step) for f, step in ((feed, 0), (feed, 1), (other, 0))]
    for one, two in itertools.combinations(draws, 2):
        for name in ("positions", "t", "noise"):
            assert not torch.equal(one[name], two[name])


def test_a_global_batch_may_be_larger_than_the_data(folder):
    (feed,) = feeds(f"latents:{folder}", "epsilon", 1, 30, global_batch=30)
    counts = np.bincount(next(feed.micro_batches(0)).positions, minlength=COUNT)
    assert counts.sum() == 30 and set(counts) == {2, 3}


@pytest.mark.parametrize("share, low, high", [(0.0, 0, 0), (0.1, 60, 140), (1.0, 1000, 1000)])
def test_labels_are_withheld_at_the_asked_rate(share, low, high):
    (feed,) = feeds("synthetic", "flow", 1, 1000, global_batch=1000, class_dropout=share)
    drop = next(feed.micro_batches(0)).conditions["drop"]
    assert drop.dtype == torch.bool and low <= int(drop.sum()) <= high


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="12 does not divide by 5 shares x micro_batch 1"):
        feeds("digits", "epsilon", 5, 1)


# ---- data that lives on the device --------------------------------------------------------------


def test_digits_are_pixels_widened_to_patches():
    from sklearn.datasets import load_digits

    digits = open_data("digits", "cpu")
    assert digits.facts == check_data("digits") == DataFacts(1797, 4, 32, 10)
    x, y = digits.fetch(np.arange(1797))
    assert x.shape == (1797, 4, 32, 32) and x.dtype == torch.float32
    assert (x.min(), x.max()) == (-1, 1)
    assert y.dtype == torch.int64 and sorted(set(y.tolist())) == list(range(10))
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).movedim(1, -1).flatten(3)
    assert (patches == patches[..., :1]).all() and x.std() > 0.5
    images, labels = load_digits(return_X_y=True)
    assert np.array_equal(8 * (x[:, 0, ::4, ::4].flatten(1) + 1), images)
    assert np.array_equal(y, labels)


@pytest.mark.parametrize("name, side", [("synthetic", 32), ("synthetic:64", 64)])
def test_synthetic_is_the_same_noise_everywhere(name, side):
    facts, data = check_data(name), open_data(name, "cpu")
    x, y = data.fetch(np.arange(facts.size))
    assert facts == data.facts and x.shape == (facts.size, 4, side, side)
    assert x.std().item() == pytest.approx(1, abs=0.01)
    assert y.min() >= 0 and 900 < y.max() < facts.classes == 1000
    assert torch.equal(x, open_data(name, "cpu").fetch(np.arange(facts.size))[0])


@pytest.mark.parametrize(
    "name, words",
    [
        ("digts", "unknown data 'digts'; did you mean digits?"),
        ("synthetic:big", "unknown data 'synthetic:big'"),
        ("latents:/no/such", "no folder /no/such; it should hold imagenet256_features/"),
    ],
)
def test_unknown_data_is_refused_with_the_way_out(name, words):
    for use in (check_data, lambda n: open_data(n, "cpu")):
        with pytest.raises(ValueError) as refusal:
            use(name)
        assert words in str(refusal.value) and "\n" not in str(refusal.value)


# ---- folders of latents -------------------------------------------------------------------------


def test_a_folder_is_read_by_name_in_number_order(folder):
    data = open_data(f"latents:{folder}", "cpu")
    assert data.facts == check_data(f"latents:{folder}") == DataFacts(COUNT, 4, 8, 1000)
    x, y = data.fetch(np.array([10, 2, 2]))
    assert x.shape == (3, 4, 8, 8) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert x[:, 0, 0, 0].tolist() == [10, 2, 2] and y.tolist() == [100, 20, 20]


def test_column_major_files_are_read_as_they_were_saved(folder):
    latent = np.arange(256, dtype=np.float32).reshape(1, 4, 8, 8)
    write(folder, "5", np.asfortranarray(latent), np.array([1]))
    x, _ = open_data(f"latents:{folder}", "cpu").fetch(np.array([5]))
    assert np.array_equal(x.numpy(), latent)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


FAULTS = {
    "missing label": (
        lambda r: (r / "imagenet256_labels/3.npy").unlink(),
        "imagenet256_labels/3.npy is missing: imagenet256_features has 12 files",
    ),
    "no partner folder": (
        lambda r: (r / "imagenet256_labels").rename(r / "labels"),
        "has no pair of folders *_features and *_labels",
    ),
    "truncated": (
        lambda r: truncate(r / "imagenet256_features/5.npy"),
        "imagenet256_features/5.npy has 1052 of 1152 bytes; extract it again",
    ),
    "other shape": (
        lambda r: write(r, "5", np.zeros((1, 4, 16, 16), np.float32), np.array([1])),
        "5.npy holds float32[1, 4, 16, 16] where 0.npy holds float32[1, 4, 8, 8]",
    ),
    "objects": (
        lambda r: np.save(r / "imagenet256_features/5.npy", np.array([{}]), allow_pickle=True),
        "5.npy holds Python objects",
    ),
    "label too high": (
        lambda r: write(r, "5", np.zeros((1, 4, 8, 8), np.float32), np.array([1000])),
        "imagenet256_labels/5.npy holds label 1000; classes are 0 to 999",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_folder_is_refused_in_one_line(folder, fault):
    spoil, words = FAULTS[fault]
    check_data(f"latents:{folder}")
    spoil(folder)
    with pytest.raises(ValueError) as refusal:
        check_data(f"latents:{folder}")
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("fault", ["truncated", "label too high"])
def test_a_file_spoilt_during_training_is_named_when_it_is_fetched(folder, fault):
    data = open_data(f"latents:{folder}", "cpu")
    spoil, words = FAULTS[fault]
    spoil(folder)
    data.fetch(np.array([1, 2]))
    with pytest.raises(ValueError) as refusal:
        data.fetch(np.arange(COUNT))
    assert words in str(refusal.value)


def test_a_file_spoilt_ahead_is_named_only_when_it_is_due(folder):
    (feed,) = feeds(f"latents:{folder}", "flow", 1, 4)
    spoilt = sample_order(3, COUNT, 0, COUNT)[4]
    truncate(folder / f"imagenet256_features/{spoilt}.npy")
    batches = feed.micro_batches(0)
    first = next(batches)
    assert first.x[:, 0, 0, 0].tolist() == first.positions.tolist() and len(first.x) == 4
    with pytest.raises(ValueError, match=rf"imagenet256_features/{spoilt}\.npy has"):
        next(batches)


def test_values_that_are_not_finite_are_named_when_they_are_fetched(folder):
    write(folder, "5", np.full((1, 4, 8, 8), np.nan, np.float32), np.array([1]))
    data = open_data(f"latents:{folder}", "cpu")
    with pytest.raises(ValueError, match=r"5\.npy holds values that are not finite"):
        data.fetch(np.array([5]))
