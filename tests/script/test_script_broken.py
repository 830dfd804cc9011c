"""Scripts that cannot be measured, and what their rows say; and some that only look like it."""

from __future__ import annotations

import pytest
from conftest import OnDemand, begin, launchable

from harness.result import Result, Status
from harness.script.row import Script
from harness.spec import SpecError
from tests.made.script_rows import edited, measure

SEEDED = ("--seed", "1", "--max_train_steps", "9")
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
LISTED = ("accumulate(model)", "accumulate([model])")
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
CASES = {
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
                  "without gradients inside 8 of 8 timed steps"),
    "copies a DTensor": ("fsdp2", [(PREPARE, PREPARE + COPIES)], (), REFUSED, BEFORE),
    "copies before fsdp2": ("fsdp2", [(PREPARE, COPIES + PREPARE)], (), OK, ""),
}  # fmt: skip
"""Case -> its recipe, edits, further words, status, and what its row says."""
OFTEN = {
    *("exception", "raw backward", "two models", "too few steps", "ranks alone"),
    *("precision in code", "saves"),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> OnDemand:
    folder = tmp_path_factory.mktemp("broken")

    def run(name: str) -> Result:
        recipe, edits, words, *_ = CASES[name]
        script = edited(folder / name.replace(",", "").replace(" ", "_"), *edits)
        return measure(begin, recipe, script.parent / "row", script, (*SEEDED, *words))

    return OnDemand(run)


def said(row: Result) -> str:
    """What a reader of the row is told."""
    skipped = row.evidence.get("script", {}).get("skipped", {})
    return "\n".join([row.reason or "", row.way_out or "", *row.meter_notes, *skipped])


@pytest.mark.parametrize("name", launchable(CASES, OFTEN))
def test_a_row_has_its_outcome_and_names_the_cause(rows, name):
    *_, status, text = CASES[name]
    row = rows[name]
    assert row.status is status, f"{row.status} {row.reason}\n{row.log_tail}"
    assert text in said(row)


def test_an_exception_is_shown_from_the_scripts_own_line_on(rows):
    log = rows["exception"].log_tail
    assert "in main" in log and "assert step < 2" in log and "watch.py" not in log


def test_a_script_that_ends_early_is_told_how_many_steps_are_needed(rows):
    assert "--steps" in rows["too few steps"].way_out


@pytest.mark.parametrize(
    "words", [["accelerate", "launch", "train.py"], ["--config_file", "x"], []]
)
def test_a_launcher_in_the_place_of_a_script_is_refused(tmp_path, words):
    with pytest.raises(SpecError, match=r"train\.py"):
        Script.of(["--", *words], tmp_path)
