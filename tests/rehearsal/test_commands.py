"""Commands on rehearsed cards, as a person types them on a first machine with GPUs.

Seconds say nothing here. ``docs/how-to/first-gpu.md`` lists what no rehearsal shows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from harness import ROOT
from harness.planner.calibrate.parts import MEASURES, Outcome
from harness.planner.calibration import record
from harness.planner.oom import snapshot
from harness.result import REHEARSED, Result, Status, load
from strategies.base import BadInput
from tests.made.living import left, phases, ranks, until
from tests.rehearsal import build
from tests.rehearsal.build import H100, Card
from tests.rehearsal.rows import absent

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(bool(build.absent()), reason=build.absent() or "it is there"),
]

MIB = 2**20
SMALL = ("--model", "DiT-T/8", "--data", "synthetic", "--device", "cuda")
BRIEF = (*SMALL, "--global-batch", "8", "--steps", "2", "--warmup", "1")


def start(cards: Sequence[Card], folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    """``./run.sh`` with these cards and variables."""
    (folder / "cards").mkdir(exist_ok=True)
    own = {**build.environment(cards, folder / "cards"), "COLUMNS": "200", **more}
    return subprocess.Popen(
        ["./run.sh", *words],
        cwd=ROOT,
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def said(cards: Sequence[Card], folder: Path, *words: str, code: int = 0, **more: str) -> str:
    """The output of a command that ends with ``code``."""
    child = start(cards, folder, *words, **more)
    text = child.communicate()[0]
    assert child.returncode == code, text
    return text


def row(out: Path) -> Result:
    (path,) = out.glob("runs/*/result.json")
    return load_rehearsed(path)


def load_rehearsed(path: Path) -> Result:
    """A row; outside a rehearsal no reader takes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REHEARSAL_CARDS", str(H100))
        return load(path)


def sized(mib: int) -> Card:
    return dataclasses.replace(H100, bytes=mib * MIB)


# ---- doctor ----

A100 = Card("NVIDIA A100-SXM4-80GB", 80 * 2**30, "8.0", 108)
V100 = Card("Tesla V100-SXM2-16GB", 16 * 2**30, "7.0", 80)
GB10 = Card("NVIDIA GB10", 120 * 2**30, "12.1", 48)
SLICE = Card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * 2**30, "9.0", 16)
PCIE = dataclasses.replace(H100, name="NVIDIA H100 PCIe")
DOCTORED = {
    "1 card": (
        [H100],
        "",
        ["0: NVIDIA H100 80GB HBM3, 79.2 GiB", "ddp needs 2 GPUs"],
    ),
    "2 cards": ([H100] * 2, "", ["1: NVIDIA H100 80GB HBM3", "hsdp needs 4 GPUs"]),
    "8 cards": ([H100] * 8, "", ["7: NVIDIA H100 80GB HBM3"]),
    "mixed, counted as nvidia-smi does": ([A100, H100], "", ["0: NVIDIA A100", "1: NVIDIA H100"]),
    "too old": ([V100], "", ["0: Tesla V100-SXM2-16GB, 16.0 GiB", "ddp this torch is built for"]),
    "MIG": ([SLICE], "mig", ["1g.10gb, 10.0 GiB, 10.0 GiB free"]),
    "no size": ([GB10], "unknown", ["0: NVIDIA GB10, 120.0 GiB, 120.0 GiB free"]),
    "old driver": ([PCIE], "old", ["torch sees none", "driver on your system is too old"]),
    "broken nvidia-smi": ([H100], "broken", ["0: NVIDIA H100 80GB HBM3, 79.2 GiB"]),
    "no nvidia-smi": ([H100], "missing", ["0: NVIDIA H100 80GB HBM3, 79.2 GiB"]),
}
"""Case -> cards, nvidia-smi's kind of answer, words that doctor prints."""


@pytest.mark.parametrize("case", DOCTORED)
def test_doctor_names_the_cards_and_what_they_cannot_do(case, tmp_path):
    cards, smi, words = DOCTORED[case]
    # DeepSpeed's ops compile for minutes on each kind of card, and are not what is looked at.
    more = {"REHEARSAL_SMI": smi, "CXX": "false", "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
    text = " ".join(said(cards, tmp_path, "doctor", "--out", str(tmp_path), **more).split())
    assert [word for word in words if word not in text] == [], text


# ---- one recipe ----


def test_max_batch_runs_into_the_allocator_s_out_of_memory(tmp_path):
    """The answer fits, and one sample more does not."""
    words = ("--recipe", "single", "--model", "DiT-T/4", "--first", "70", "--most", "74")
    text = said([sized(256)], tmp_path, "max-batch", *words, "--out", str(tmp_path / "out"))
    found = json.loads((tmp_path / "out" / "max_batch.json").read_text())
    ends = {probe["micro_batch"]: probe for probe in found["probes"]}
    best = found["micro_batch"]
    assert best and ends[best]["status"] == "ok" and ends[best + 1]["status"] == "gpu_oom"
    assert "CUDA out of memory" in ends[best + 1]["reason"]
    assert f"largest micro batch: {best} " in text


def test_anatomy_s_two_counts_of_activations_agree(tmp_path):
    words = ("anatomy", "single", "--model", "DiT-T/8", "--global-batch", "8", "--out")
    text = said([H100], tmp_path, *words, str(tmp_path / "out"))
    assert "Two counts of the activations  agree" in text
    assert (tmp_path / "out" / "anatomy.html").exists()


def test_the_snapshot_of_each_rank_names_allocations_of_its_card(tmp_path):
    out = tmp_path / "out"
    words = ("run", "--recipes", "fsdp2", *BRIEF, "--out", str(out), "--no-predictions")
    said([H100] * 2, tmp_path, *words, "--snapshot", "--profile")
    assert any(found["device_bytes"] > MIB for found in row(out).key_averages)
    (folder,) = (path.parent for path in out.glob("runs/*/result.json"))
    assert list(folder.glob("profile/*.pt.trace.json.gz"))
    for rank in (0, 1):
        (found,) = folder.rglob(f"snapshot.rank{rank}.pickle")
        history = pickle.loads(found.read_bytes())["device_traces"]
        assert any(event["action"] == "alloc" for event in history[rank])
        with found.open("rb") as file:
            (one,) = snapshot.snapshots(snapshot.load(file))
        assert one.numbers.allocated == sum(one.phases.values()) > 0 and one.lines


def test_training_on_four_cards_goes_on_where_it_was(tmp_path):
    words = ("train", "--recipe", "fsdp2+bf16", *SMALL, "--save-every", "3", "--sample-steps", "2",
             "--out", str(tmp_path / "out"))  # fmt: skip
    said([H100] * 4, tmp_path, *words, "--steps", "6")
    text = said([H100] * 4, tmp_path, *words, "--steps", "9", "--resume")
    assert "resumes step-00000006" in text
    result = load_rehearsed(tmp_path / "out" / "result.json")
    assert result.status is Status.OK and len(result.losses) == 9
    assert (tmp_path / "out" / "samples.png").exists()


# ---- calibrate ----


def ends(out: Path) -> dict[str, Outcome]:
    """Station that ran in ``out`` -> its outcome."""
    found = [json.loads(path.read_text()) for path in out.glob("stations/*.json")]
    return {one["station"]: Outcome(**one) for one in found}


def wrong(found: Mapping[str, Outcome]) -> dict[str, str]:
    """Stations that did not end well, though cards can be rehearsed for them -> the reason."""
    ended = {name: one for name, one in found.items() if one.status not in ("ok", "lacking")}
    return {n: one.reason for n, one in ended.items() if not any(map(absent, n.split()))}


def test_calibrate_measures_memory_on_two_cards_to_its_end(tmp_path):
    out = tmp_path / "out"
    words = ("calibrate", "--part", "memory", "--small", "--device", "cuda", "--out", str(out))
    text = said([H100] * 2, tmp_path, *words, code=1)  # a row that compiles fails
    found = ends(out)
    assert not wrong(found), wrong(found)
    assert all(found[name].status == "ok" for name in MEASURES["cuda"]), text
    assert sum(one.status == "ok" for one in found.values()) >= 16, text
    kept = json.loads((out / "calibration.json").read_text())
    assert kept["device"]["name"] == REHEARSED and kept["ceilings"]["collective"]["ranks"] == 2
    with pytest.raises(BadInput, match="rehearsed GPU"):
        record.load(out / "calibration.json")


def test_calibrate_checks_the_catalog_within_its_minutes(tmp_path):
    """The project's tests for GPUs, the meter's cost and rows; what has no time left is skipped."""
    out = tmp_path / "out"
    parts = ("--part", "check", "--part", "memory", "--small", "--device", "cuda", "--jobs", "1")
    more = {"CXX": "false", "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
    words = ("calibrate", *parts, "--minutes", "5", "--out", str(out))
    text = start([H100], tmp_path, *words, **more).communicate()[0]
    found = ends(out)
    assert not wrong(found), wrong(found)
    assert found["gpu tests"].status == "ok" and " failed" not in found["gpu tests"].reason
    assert "meter_share" in found["what measuring costs"].facts
    assert found["single"].status == "ok" and "products: skipped" in text, text
    assert (out / "calibration.json").exists() and out.with_suffix(".tar.gz").exists()


# ---- faults ----


def begun(folder: Path, count: int, *words: str) -> subprocess.Popen[str]:
    """A row of many steps on ``count`` cards, all ranks of which are measuring."""
    options = (*SMALL, "--global-batch", "8", "--steps", "100000", "--warmup", "1")
    line = ("run", "--recipes", "ddp", *options, "--out", str(folder / "out"), "--no-predictions")
    child = start([H100] * count, folder, *line, *words)
    until(lambda: len(ranks(folder / "out")) == count or child.poll() is not None)
    return child


def test_a_rank_killed_in_a_collective_ends_the_row(tmp_path):
    child = begun(tmp_path, 2)
    os.kill(ranks(tmp_path / "out")[1], signal.SIGKILL)
    text = child.communicate()[0]
    assert child.returncode == 1, text
    found = row(tmp_path / "out")
    assert found.status is Status.FAILED and "SIGKILL" in found.reason, found.reason
    until(lambda: not left(tmp_path / "out"))


def test_a_rank_that_hangs_in_a_collective_ends_at_the_deadline(tmp_path):
    child = begun(tmp_path, 2, "--timeout", "45")
    os.kill(ranks(tmp_path / "out")[1], signal.SIGSTOP)
    text = child.communicate()[0]
    found = row(tmp_path / "out")
    assert child.returncode == 1 and found.status is Status.TIMEOUT, text
    until(lambda: not left(tmp_path / "out"))


FULL = [(12, "DiT-T/8", 8, "start"), (24, "DiT-T/8", 8, "load"), (256, "DiT-T/4", 96, "warmup")]
"""MiB of a card, model, samples, and the phase whose allocation fails."""


@pytest.mark.parametrize(("mib", "model", "samples", "phase"), FULL)
def test_an_allocation_that_fails_is_an_out_of_memory_of_its_phase(
    mib, model, samples, phase, tmp_path
):
    words = ("run", "--recipes", "single", *BRIEF, "--model", model, "--global-batch", str(samples))
    out = ("--out", str(tmp_path / "out"), "--no-predictions")
    said([sized(mib)], tmp_path, *words, *out, code=1)
    found = row(tmp_path / "out")
    assert (found.status, found.phase) == (Status.GPU_OOM, phase), found.reason


def user_of(folder: Path) -> Path:
    """The file with the bytes that this process takes of card 0, from outside a run."""
    (folder / "cards" / "card0").mkdir(parents=True, exist_ok=True)
    return folder / "cards" / "card0" / str(os.getpid())


def test_a_card_that_another_process_uses_is_refused(tmp_path):
    user_of(tmp_path).write_bytes((79 * 2**30).to_bytes(8, "little"))
    words = ("run", "--recipes", "single", *BRIEF, "--no-predictions", "--out", str(tmp_path / "o"))
    text = said([H100], tmp_path, *words, code=1)
    assert "GPU 0 is in use" in text and f"pid {os.getpid()}" in text


@pytest.mark.parametrize("phase", ["prepare", "memory", "measure"])
def test_a_card_that_fills_from_outside_ends_the_row_in_that_phase(phase, tmp_path):
    """No cache: each tensor is allocated by the driver, whose last byte is gone at once."""
    words = ("run", "--recipes", "single", *SMALL, "--model", "DiT-T/4", "--no-predictions")
    words += ("--global-batch", "32", "--steps", "1000", "--warmup", "1", "--out")
    more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    child = start([H100], tmp_path, *words, str(tmp_path / "out"), **more)
    until(lambda: phase in phases(tmp_path / "out") or child.poll() is not None, pause=0.002)
    user_of(tmp_path).write_bytes(H100.bytes.to_bytes(8, "little"))
    text = child.communicate()[0]
    found = row(tmp_path / "out")
    assert (found.status, found.phase) == (Status.GPU_OOM, phase), text
