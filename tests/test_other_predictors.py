"""Figures of other projects' predictors (docs/other-predictors.json), and the page that shows
them."""

from __future__ import annotations

import json
import re
import statistics

import pytest

from tests.made import other_predictors as others
from tests.made.public_rows import kept, rows

pytestmark = pytest.mark.thorough
RECOMPUTED = ("LTX-Video 2B, full fine-tuning", "CogVideoX 2B, full fine-tuning, ZeRO-3 on 8")


def test_every_row_of_memory_has_the_formulas():
    known = others.record()
    assert list(known) == [row["name"] for row in others.of_memory()]
    assert all({"accelerate", "deepspeed", "sixteen"} <= got.keys() for got in known.values())


def test_the_page_shows_what_is_on_record():
    known, page = others.record(), others.PAGE.read_text(encoding="utf-8")
    for table in (others.summary_table(known), others.each_table(known)):
        assert "\n".join(table) + "\n" in page


def test_the_page_names_the_versions_of_the_record():
    page = others.PAGE.read_text(encoding="utf-8")
    versions = json.loads(others.RECORD.read_text(encoding="utf-8"))["versions"]
    names = {"accelerate": "accelerate", "deepspeed": "DeepSpeed", "fakegpu": "FakeGPU"}
    for name, version in versions.items():
        assert f"{names.get(name, 'MemTracker of torch')} {version} |" in page


def test_the_summary_is_the_count_of_the_rows():
    """Counted anew from the two records, without the functions that made the table."""
    page, known, ours = others.PAGE.read_text(encoding="utf-8"), others.record(), kept()
    told = re.findall(r"^\| adapters with checkpoints, allocated \| (.*) \|$", page, re.M)
    adapted = [row for row in rows() if "allocated" in row and "reserved" not in row]
    adapted = [row for row in adapted if "lora" in row["run"]["recipe"]]
    adapted = [row for row in adapted if row.get("figure") != "whole run"]
    adapted = [row for row in adapted if "checkpoint" in row["run"]["recipe"]]
    for words, of in (
        ("Headroom", {row["name"]: ours[row["name"]]["allocated"] for row in adapted}),
        ("accelerate", {row["name"]: known[row["name"]]["accelerate"] for row in adapted}),
    ):
        errors = [abs(of[row["name"]] / row["allocated"] - 1) for row in adapted]
        cells = next(line for line in told if line.startswith(words)).split(" | ")
        near = [str(sum(error <= limit for error in errors)) for limit in (0.05, 0.18)]
        assert cells[1:3] == [str(len(errors)), f"{100 * statistics.median(errors):.1f} %"]
        assert cells[4:] == near


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_row_comes_out_as_recorded(name):
    row = next(row for row in rows() if row["name"] == name)
    got, known = others.formulas(row), others.record()[name]
    assert got == pytest.approx({key: known[key] for key in got}, rel=1e-6)


def test_deepspeed_needs_counts_of_a_model_without_addresses():
    """The page says why numbers are passed: every tensor on meta has the address 0."""
    import torch
    from deepspeed.runtime.zero.stage3 import model_to_params

    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    total, largest = model_to_params(model)
    assert total < sum(p.numel() for p in model.parameters()) == 4 * largest


@pytest.mark.parametrize("frozen", [False, True])
def test_memtracker_takes_no_frozen_parameter(frozen):
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model[0].requires_grad_(not frozen)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            if frozen:
                with pytest.raises(RuntimeError, match="doesn't require gradient"):
                    model(torch.empty(2, 8))
            else:
                model(torch.empty(2, 8)).sum().backward()
