"""A pool's history: models that a GPU held before, whose segments the training's tensors find."""

from __future__ import annotations

import pytest
import torch
from conftest import predictions

from harness import cli
from harness.planner import pool, resident_models
from harness.planner.tracing import world
from harness.resolve import resolve
from harness.spec import Spec, SpecError
from harness.system import requirements
from strategies.base import BadInput
from tests.made.predictions import GIB

BASE = dict(recipe="single", model="DiT-T/2:depth=2", data="synthetic", device="cuda")
PASTS = ["", "1GiB", "CLIP-L", "CLIP-L,1GiB"]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("history")
    cases = [{**BASE, "global_batch": 64, "before": past} for past in PASTS]
    return dict(zip(PASTS, predictions(cases, folder), strict=True))


def test_the_training_s_tensors_are_put_into_what_was_freed(found):
    """One free segment holds them all, so that next to nothing more is reserved; what a step holds
    is what it holds without a history."""
    plain, after = found[""], found["1GiB"]
    assert (
        0.1 * GIB < plain["reserved"] < 0.5 * GIB and plain["steady"]["bytes"] < plain["reserved"]
    )
    assert GIB <= after["reserved"] < 1.05 * GIB
    assert after["steady"] == plain["steady"] and after["between"] == plain["between"]
    assert after["work"] == plain["work"]


def test_what_was_held_counts_as_a_peak_of_the_set_up(found):
    assert found["1GiB"]["peak"]["bytes"] == found["1GiB"]["allocated"] == GIB
    assert found["1GiB"]["peak"]["phase"] == "load" and found[""]["peak"]["phase"] != "load"
    clip = found["CLIP-L"]["phases"]["load"]
    assert clip == pytest.approx(2 * resident_models.table()["CLIP-L"]["elements"], rel=1e-4)


def test_all_of_them_were_held_at_once(found):
    both, whole = found["CLIP-L,1GiB"], found["CLIP-L"]["phases"]["load"] + GIB
    assert both["phases"]["load"] == whole
    assert both["allocated"] == pytest.approx(whole, rel=0.01)
    assert both["reserved"] > found["1GiB"]["reserved"]


def test_without_the_option_no_prediction_has_another_name():
    plain = Spec(**BASE)
    assert "before" not in plain.to_dict()
    assert Spec(**BASE, before="CLIP-L").key != plain.key


class Parts(torch.nn.Module):
    """Children before its own, two of them with one weight, and buffers."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.zeros(7))
        self.first, self.last = torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(2)
        self.again = torch.nn.Linear(3, 5)
        self.again.weight = self.first.weight


def test_tensors_come_in_the_order_in_which_a_module_is_moved():
    module, told = Parts(), []

    def move(tensor):
        told.append(tensor.shape)
        return tensor

    module._apply(move)
    before = [(5, 3), (5,), (2,), (2,), (2,), (2,), ()]
    assert told == [*before, (5, 3), (5,), (7,)]
    moved = [tensor.shape for tensor in world.moved(module)]
    assert moved == [*before, (5,), (7,)], "a weight that is there is not moved again"


def test_a_model_s_tensors_are_those_of_the_table_in_their_type():
    sizes, elements = world.sizes("CLIP-L"), resident_models.table()["CLIP-L"]["elements"]
    assert sizes[0] == 2 * 49408 * 768, "its words, which are moved first"
    buffers = sum(sizes) - 2 * elements
    assert len(sizes) == 196 + 1 and buffers == 77 * 8
    assert sum(world.sizes("CLIP-L:fp32")) == 4 * elements + buffers
    assert world.sizes("2.5GiB") == (int(2.5 * GIB),) and world.sizes("") == ()
    with pytest.raises(BadInput, match="before is 'CLIP-M'"):
        world.sizes("CLIP-M")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "L4", "--before", "T5-XXXL"], "before is 'T5-XXXL', which is not a known model"),
        (["--gpu", "L4", "--before", "2lots"], "before is '2lots'; write a size"),
        (["--gpu", "L4", "--before", "usual"], "before is usual, but the other models of DiT-XL/2"),
        (["--cpu", "--before", "T5-XXL"], "only a GPU's allocator keeps freed memory"),
    ],
)
def test_what_no_pool_can_have_held_is_refused(words, said, capsys, monkeypatch):
    monkeypatch.setattr(pool, "predict_all", lambda *a, **k: pytest.fail("something was started"))
    assert cli.main(["plan", "--recipes", "single", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_finds_the_pool_that_is_there():
    with pytest.raises(SpecError, match="leave --before out"):
        Spec(**{**BASE, "device": "cpu"}, before="CLIP-L").check()
    lack = requirements.obstacle(resolve(Spec(**BASE, before="CLIP-L")), machine=None)
    assert "before is CLIP-L" in lack.text and "plan --before" in lack.hint
    with pytest.raises(SystemExit):
        cli.main(["run", "--recipes", "single", "--before", "CLIP-L"])
