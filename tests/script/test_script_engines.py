"""A script under launch files of two processes computes what ddp does; or its row says why not."""

from __future__ import annotations

import pytest
from conftest import OnDemand, begin, launchable

from harness.report.figures import parity
from harness.result import Result, Status
from tests.made.script_rows import SCRIPTS, edited, measure

CLIP = 0.1
SEEDED = ("--seed", "1", "--max_train_steps", "9")
WORDS = (*SEEDED, "--max_grad_norm", str(CLIP))
ENGINES = ("zero2_offload", "zero3", "fsdp2")  # an offloaded AdamW stays the script's
LISTED = ("accumulate(model)", "accumulate([model])")
CASES = {
    **{name: (name, (), ()) for name in ("ddp", *ENGINES)},
    "checkpoint": ("fsdp2+checkpoint", (), ()),
    "adam8bit": ("ddp+adam8bit", (), ("--width", "64")),
    "unclipped": ("zero2", (), ()),
    "list under ddp": ("ddp", (LISTED,), ("--gradient_accumulation_steps", "2")),
}
"""Row -> its recipe, edits of the script, and further words."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> OnDemand:
    folder = tmp_path_factory.mktemp("engines")

    def run(name: str) -> Result:
        recipe, edits, words, *end = (CASES | ENDS)[name]
        place = folder / name.replace(",", "").replace(" ", "_")
        script = edited(place, *edits) if edits else SCRIPTS / "train.py"
        clip = 1.0 if end else None if name == "unclipped" else CLIP
        words = (*(SEEDED if end else WORDS), *words)
        return measure(begin, recipe, place / "row", script, words, clip=clip)

    return OnDemand(run)


@pytest.fixture
def row(request, rows):
    found = rows[request.param]
    assert found.status is Status.OK, f"{found.reason}\n{found.log_tail}"
    return found


@pytest.mark.parametrize("row", [*ENGINES, "checkpoint"], indirect=True)
def test_an_engine_computes_what_ddp_computes(row, rows):
    far = parity.distances(row, rows["ddp"])
    assert far["loss"] < parity.FLOAT32.loss and far["norm"] < parity.FLOAT32.norm
    assert len(row.losses) == len(rows["ddp"].losses)
    assert all(norm > CLIP for norm in rows["ddp"].grad_norms), "clipping counts"


@pytest.mark.parametrize("row", ["ddp", *ENGINES], indirect=True)
def test_all_ranks_trained_together(row):
    assert [rank.rank for rank in row.ranks] == [0, 1] and row.spec.global_batch == 4
    assert all(check.ok for check in row.audit)


@pytest.mark.parametrize("row", ["zero3", "fsdp2"], indirect=True)
def test_each_rank_holds_a_shard(row, rows):
    whole, shard = (r.ranks[0].categories for r in (rows["ddp"], row))
    assert shard.optimizer_state < 0.8 * whole.optimizer_state  # zero3 has a copy of the weights
    assert row.evidence["script"]["parameters"] == rows["ddp"].evidence["script"]["parameters"]


@pytest.mark.parametrize("row", ["checkpoint"], indirect=True)
def test_an_added_checkpoint_recomputes_every_block(row, rows):
    facts = row.evidence["checkpoint"]
    assert facts["blocks_recomputed"] == facts["blocks"] == 3
    ours, theirs = (r.ranks[0].categories for r in (row, rows["fsdp2"]))
    assert ours.activations < theirs.activations


@pytest.mark.parametrize("row", ["adam8bit"], indirect=True)
def test_an_added_optimizer_steps_in_the_place_of_the_scripts(row, rows):
    ours, theirs = (r.evidence["script"]["optimizers"] for r in (row, rows["ddp"]))
    assert theirs == ["AdamW"] != ours
    assert row.evidence["adam8bit"]["moment_bytes_per_element"] < 2.4
    found = row.ranks[0].categories
    assert found.optimizer_state < 1.2 * found.parameters  # whole moments are twice as large


def test_a_file_that_switches_clipping_off_makes_a_row_void(rows):
    row = rows["unclipped"]
    assert row.status is Status.VOID and "clip" in row.reason


def test_a_list_in_accumulate_is_told_of(rows):
    row = rows["list under ddp"]
    assert row.status is Status.OK, row.reason
    assert row.accumulation == 2
    assert any("list" in note for note in row.meter_notes)


# ---- scripts that cannot be measured ----


BACKWARD = "accelerator.backward(loss)"
PREPARE = """    model, loader, scheduler, *optimizers = accelerator.prepare(
        model, loader, scheduler, *optimizers
    )
"""
APART = """    model, optimizers[0] = accelerator.prepare(model, optimizers[0])
    loader = accelerator.prepare(loader)
"""
SECOND = """    critic = Denoiser(args.width, depth=1)
    critic, model, loader, scheduler, *optimizers = accelerator.prepare(
        critic, model, loader, scheduler, *optimizers
    )
"""
ALONE = (
    "import argparse\n",
    "import argparse\nimport os\n\nos.environ.pop('LOCAL_RANK')\nos.environ.pop('WORLD_SIZE')\n",
)
SAVES = (
    "                step += 1\n",
    "                step += 1\n"
    "                if accelerator.is_main_process:\n"
    "                    accelerator.save_state(args.output_dir)\n",
)
LAUNCHER = "    import accelerate\n\n    accelerate.notebook_launcher(main, num_processes=2)\n"
VALIDATES = """                model.eval()
                with torch.no_grad():
                    model(noisy, t)
                model.train()
"""
COPIES = """    import copy

    average = copy.deepcopy(model)
"""
BEFORE = "make the copy before accelerator.prepare"
NO_COLOUR = "assert step < 2, 'this picture has no colour'"
LISTS = ("--gradient_accumulation_steps", "2")
OWN = ("Accelerator(", "Accelerator(deepspeed_plugin=object(), ")
BF16 = ("Accelerator(", "Accelerator(mixed_precision='bf16', ")
REFUSED, OK = Status.REFUSED, Status.OK
ENDS = {
    "exception": ("single", [(BACKWARD, f"{BACKWARD}\n                {NO_COLOUR}")], (),
                  Status.FAILED, "this picture has no colour"),
    "no backward": ("single", [(BACKWARD, "pass")], (), REFUSED, "accelerator.backward"),
    "raw backward": ("single", [(BACKWARD, "loss.backward()")], (), REFUSED,
                     "without accelerator.backward"),
    "no loader": ("zero2", [(PREPARE, APART)], (), REFUSED, "DataLoader"),
    "two models": ("zero2", [(PREPARE, SECOND)], (), REFUSED, "one model"),
    "two optimizers": ("zero2", [], ("--two_optimizers",), REFUSED, "optimizer"),
    "list": ("fsdp2", [LISTED], LISTS, REFUSED, "list to accumulate"),
    "too few steps": ("single", [], ("--max_train_steps", "2"), Status.FAILED, "2 optimizer steps"),
    "launches by itself": ("single", [("    main()\n", LAUNCHER)], (), REFUSED,
                           "launches its training processes by itself"),
    "ranks alone": ("ddp", [ALONE], (), Status.VOID, "the ranks never met"),
    "own plugin": ("zero2", [OWN], (), REFUSED, "deepspeed_plugin"),
    "precision in code": ("single", [BF16], (), OK, "mixed_precision=bf16"),
    "saves": ("fsdp2", [SAVES], (), OK, "save_state"),
    "validates": ("single", [(BACKWARD, f"{BACKWARD}\n{VALIDATES}")], (), OK,
                  "without gradients inside 1 of 1 timed steps"),
    "copies a DTensor": ("fsdp2", [(PREPARE, PREPARE + COPIES)], (), REFUSED, BEFORE),
    "copies before fsdp2": ("fsdp2", [(PREPARE, COPIES + PREPARE)], (), OK, ""),
}  # fmt: skip
"""Case -> its recipe, edits, further words, status, and what its row says."""
OFTEN = {
    *("exception", "raw backward", "two models", "too few steps", "ranks alone"),
    *("precision in code", "saves"),
}


def said(row: Result) -> str:
    """What a reader of the row is told."""
    skipped = row.evidence.get("script", {}).get("skipped", {})
    return "\n".join([row.reason or "", row.way_out or "", *row.meter_notes, *skipped])


@pytest.mark.parametrize("name", launchable(ENDS, OFTEN))
def test_a_row_has_its_outcome_and_names_the_cause(rows, name):
    *_, status, text = ENDS[name]
    row = rows[name]
    assert row.status is status, f"{row.status} {row.reason}\n{row.log_tail}"
    assert text in said(row)


def test_an_exception_is_shown_from_the_scripts_own_line_on(rows):
    log = rows["exception"].log_tail
    assert "in main" in log and "assert step < 2" in log and "watch.py" not in log
    assert "--steps" in rows["too few steps"].way_out
