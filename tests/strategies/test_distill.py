"""Distillation: the teacher that a file or a size gives, and the loss that is taken against it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import SUBJECT, TINY
from safetensors.torch import load_file, save_file

from harness.planner import pool
from harness.resolve import resolve
from harness.suite.rows import identity
from strategies import initial
from strategies.base import BadInput
from strategies.distillation import files
from tests.made.machines import machine

FLOW = dataclasses.replace(TINY, objective="flow", model="DiT-T/8:depth=2")


def train(recipe: str, spec=FLOW, **fields):
    return dataclasses.replace(spec, recipe=recipe, **fields)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """The weights of a teacher of 4 blocks, as training leaves them: what takes a gradient."""
    subject = resolve(train("single", model="DiT-T/8")).subject
    module = initial.build(subject, 5, "awake")
    path = tmp_path_factory.mktemp("teacher") / "averaged.safetensors"
    state = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    save_file(state, str(path))
    return path


def test_another_file_of_the_name_is_another_measurement(file, tmp_path):
    mine = tmp_path / "mine.safetensors"
    mine.write_bytes(file.read_bytes())
    resolved = resolve(train(f"single+distill:teacher={mine}"))
    before = identity(resolved, machine(tmp_path))
    assert before == identity(resolved, machine(tmp_path))
    mine.write_bytes(file.read_bytes() + b" ")
    assert before != identity(resolved, machine(tmp_path))


def test_a_kept_prediction_is_of_the_teacher_s_shapes(file, tmp_path):
    """Its values are nobody's business there: one trained anew in its size keeps the prediction."""
    mine, state = tmp_path / "mine.safetensors", load_file(file)
    resolved = resolve(train(f"single+distill:teacher={mine}"))

    def place(saved: dict) -> Path:
        save_file(saved, str(mine))
        return pool.path_of(resolved, tmp_path)

    before = place(state)
    assert before != pool.path_of(resolve(train("single")), tmp_path)
    assert before == place({name: value + 1 for name, value in state.items()})
    assert before != place({n: v for n, v in state.items() if not n.startswith("blocks.3.")})
    assert before != place({name: value.bfloat16() for name, value in state.items()})
    mine.write_text("no header of any length")
    assert before != pool.path_of(resolved, tmp_path)


# ---- teacher, loss and student ----


def test_the_teacher_has_the_file_s_weights(file, train_here):
    run = train_here(train(f"single+distill:teacher={file},store=bf16"), 1)
    teacher, saved = run.attached["distill"], load_file(file)
    held = dict(teacher.module.named_parameters())
    assert set(saved) == {n for n in held if n != "pos_embed"}
    assert all(held[name].equal(value.bfloat16()) for name, value in saved.items())
    assert "teacher" not in "".join(n for n, _ in run.module.named_parameters())


def test_the_loss_is_the_sum_of_its_terms(file, train_here):
    """Against the three by hand, of the first step's batch."""
    text = f"single+distill:teacher={file},weight=0.25,feature=0.5"
    run = train_here(train(text), 1)
    plain = train_here(train("single"), 0)
    (batch,) = plain.feed.micro_batches(0)
    student, teacher = plain.module, run.attached["distill"].module
    seen: dict[int, list] = {id(student): [], id(teacher): []}
    for module, places in ((student, (0, 1)), (teacher, (1, 3))):
        for place in places:
            states = seen[id(module)]
            module.blocks[place].register_forward_hook(lambda m, g, out, s=states: s.append(out))
    far = batch.t.view(-1, 1, 1, 1)
    noisy = (1 - far) * batch.noise + far * batch.x
    given = (noisy, batch.t, batch.conditions["y"], batch.conditions["drop"])
    with torch.no_grad():
        out, target = student(*given), teacher(*given)
    true = (out - (batch.x - batch.noise)).square().mean()
    pairs = zip(seen[id(student)], seen[id(teacher)], strict=True)
    features = [
        ((mine - its).square().flatten(1).mean(1) / its.square().flatten(1).mean(1)).mean()
        for mine, its in pairs
    ]
    wanted = 0.75 * true + 0.25 * (out - target).square().mean() + 0.5 * sum(features) / 2
    assert float(run.log.losses[0]) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("more", ["accumulate", "accumulate+checkpoint"])
def test_the_cut_of_a_batch_and_recomputing_change_nothing(more, train_here):
    recipe = "single+distill:feature=1.0"
    run = train_here(train(recipe), 3)
    other = train_here(train(f"{recipe}+{more}"), 3)
    assert other.all_losses() == pytest.approx(run.all_losses(), 1e-5)
    assert other.all_norms() == pytest.approx(run.all_norms(), 1e-4)


def test_a_training_goes_on_with_its_own_teacher_alone(file, train_here):
    first = train_here(train(f"single+distill:teacher={file}"), 1)
    state = first.attached["distill"].state_dict()
    again = train_here(train(f"single+distill:teacher={file}"), 0)
    again.attached["distill"].load_state_dict(state)
    other = train_here(train("single+distill"), 0)
    with pytest.raises(BadInput, match="not the one that this training began with"):
        other.attached["distill"].load_state_dict(state)


def test_a_file_of_another_model_is_refused(file, train_here):
    spec = train(f"single+distill:teacher={file}", objective="epsilon")
    with pytest.raises(BadInput, match=r"final_layer\.linear\.weight in .* has the shape"):
        train_here(spec, 0)
    with pytest.raises(BadInput, match="cannot be read"):
        files.weights(SUBJECT, __file__)
